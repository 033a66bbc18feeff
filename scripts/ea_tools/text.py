"""Raw text to a prepared folder's tokens and back, as its PREP.json says."""

import hashlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ea_data.languages import language_in
from ea_data.system import explained
from ea_data.text import wide_encoding
from ea_tools.common import REPO, UserError, read_json

# The libraries that split text are imported where they are used: most commands read PREP.json and need none of them.


def read_prep(data: Path | str) -> dict[str, Any]:
    """The contents of DATA/PREP.json, which data-prep/ writes last, when everything else is in place."""
    path = Path(data) / "PREP.json"
    try:
        prep = read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path}: no such file; is {data} a folder made by data-prep/?{_made_by(data)}") from None
    if not isinstance(prep, dict):
        raise UserError(f"{path}: is not of the form that data-prep/ writes")
    missing = [key for key in ("source_lang", "target_lang", "tokenizer", "lowercase", "bpe") if key not in prep]
    if missing:
        raise UserError(f"{path}: has no {', '.join(missing)}")
    known = {
        "tokenizer": ("moses", "none", "given"),
        "bpe": ("subword_nmt", "sentencepiece"),
        "lowercase": (True, False),
    }
    for key, values in known.items():
        if prep[key] not in values:
            raise UserError(f"{path}: {key} {prep[key]!r} is not known here ({', '.join(map(str, values))} are)")
    texts = all(isinstance(prep[key], str) and prep[key] for key in ("source_lang", "target_lang"))
    if not (texts and all(isinstance(prep.get(key, {}), dict) for key in ("rules", "splits", "languages"))):
        raise UserError(f"{path}: is not of the form that data-prep/ writes")
    return prep


def _made_by(data: Path | str) -> str:
    """The command that makes a recipe's data, where its folder's name says which."""
    name = Path(data).name
    for script in (REPO / "data-prep").glob("*.sh"):
        language_pair = name.removeprefix(script.stem).removeprefix("-")
        wants_more = script.stem in ("corpus", "custom", "one-side")
        if name.startswith(script.stem) and re.fullmatch(r"|[a-z]{2}-[a-z]{2}", language_pair) and not wants_more:
            return f" bash data-prep/{script.name} {language_pair}".rstrip() + " makes it"
    return ""


def read_lines(path: Path | str) -> list[str]:
    """The lines of a UTF-8 file without their ends; only a line feed ends a line (never U+2028 and its like)."""
    path = Path(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(explained(error)) from None
    lines = content.removesuffix(b"\n").split(b"\n") if content else []
    return [decode(line, path, number) for number, line in enumerate(lines, 1)]


def digest(lines: Sequence[str]) -> str:
    """By this two texts, such as the references of two scores, are known to be the same."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def decode(line: bytes, path: Path | str, number: int) -> str:
    """One line of bytes as text without its end, or an error that names the file and the line's number."""
    if encoding := wide_encoding(line):
        raise UserError(f"{path}:{number}: not UTF-8 but {encoding}; convert it first: iconv -f {encoding} -t UTF-8")
    try:
        text = line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}:{number}: not UTF-8: {error.reason} at byte {error.start + 1}") from None
    return text.removeprefix("\ufeff") if number == 1 else text  # a byte-order mark is no part of the text


class Words:
    """Text of one language to words with spaces between them and back, as the data were prepared.

    Words are Moses tokens, or for a corpus of raw text (tokenizer "none") whatever has spaces around it.
    """

    def __init__(self, prep: dict[str, Any], language: str) -> None:
        from ea_data.words import words

        self._rules = prep.get("rules", {})
        escape = prep.get("escape", True)
        language = language_in(prep, language)
        self._words = words(prep["tokenizer"], language, self._rules.get("split_dashes", False), escape)

    def tokenize(self, line: str) -> str:
        """Raw text, as the held-out splits were tokenised, with spaces between the tokens."""
        if self._rules.get("plain_apostrophes"):
            line = line.replace("’", "'")
        return self._words.tokenize(line)

    def detokenize(self, line: str) -> str:
        """Tokens with spaces between to raw text."""
        return self._words.detokenize(line)


def as_written(path: Path, prep: dict[str, Any], language: str) -> list[str]:
    """The lines of a file in DATA/raw as people write them.

    Text that came in tokens is in tokens there, too; what people would have written is then got by detokenising. Where
    the corpus was brought to Unicode's form NFC, so is this text: a model cannot write any other.
    """
    from ea_data.words import composed

    lines = read_lines(path)
    if prep["tokenizer"] == "given":
        words = Words(prep, language)
        return [words.detokenize(line) for line in lines]
    return [composed(line) for line in lines] if prep.get("rules", {}).get("nfc") else lines


def references(path: Path, prep: dict[str, Any]) -> tuple[list[str], list[str]]:
    """The lines of a file in DATA/raw on the target side, twice: as people write them, and in tokens."""
    written = as_written(path, prep, prep["target_lang"])
    if prep["tokenizer"] == "given":
        return written, read_lines(path)
    words, rules, made = Words(prep, prep["target_lang"]), prep.get("rules", {}), written
    if rules.get("normalise") and rules.get("valid_every") and path.name.startswith("valid."):
        from ea_data.moses import Normalizer  # this split was training text, which was normalised

        normalizer = Normalizer(language_in(prep, prep["target_lang"]))
        made = [normalizer.clean(line) for line in written]
    return written, [words.tokenize(line) for line in made]


class Source:
    """Raw source text to the subwords that a model reads."""

    def __init__(self, data: Path, prep: dict[str, Any]) -> None:
        from ea_data.words import composed

        language = prep["source_lang"]
        self._words, self._lowercase = Words(prep, language), prep["lowercase"]
        # Text that people type may be decomposed; a corpus hardly ever is, and PREP.json says so where one is.
        self._compose = composed if prep.get("unicode", "NFC") == "NFC" else str
        # Training text had its punctuation normalised: text that people type needs it as much.
        self._normalizer = None
        if prep.get("rules", {}).get("normalise"):
            from ea_data.moses import Normalizer

            self._normalizer = Normalizer(language_in(prep, language))
        self.subwords = subwords(Path(data), prep["bpe"], language)

    def __call__(self, line: str) -> str:
        """One line of text; "" where there is nothing to translate."""
        line = self._compose(line)
        if self._normalizer:
            line = self._normalizer.clean(line)
        line = self._words.tokenize(line)
        return self.subwords.split(line.lower() if self._lowercase else line)


class Subwords:
    """How the words of a prepared folder are cut into subwords, and how these are put together again."""

    def __init__(self, split: Callable[[str], str]) -> None:
        self.split = split  # words with spaces between them to subwords with spaces between them

    def label(self, symbol: str) -> str:
        """What people read in the place of a subword."""
        return symbol

    def starts(self, symbols: Sequence[str]) -> list[bool]:
        """Of each subword of a sentence whether a word begins with it."""
        raise NotImplementedError

    def join(self, symbols: Sequence[str]) -> str:
        """The word that consecutive subwords make."""
        raise NotImplementedError


class Marked(Subwords):
    """subword-nmt's: @@ stands at the end of what is followed by more of its word."""

    def starts(self, symbols: Sequence[str]) -> list[bool]:
        return [not before.endswith("@@") for before in ("", *symbols)][: len(symbols)]

    def join(self, symbols: Sequence[str]) -> str:
        return "".join(symbol.removesuffix("@@") for symbol in symbols)


class Pieces(Subwords):
    """SentencePiece's: ▁ stands for the space before a word."""

    def starts(self, symbols: Sequence[str]) -> list[bool]:
        return [self.label(symbol).startswith("▁") for symbol in symbols]

    def join(self, symbols: Sequence[str]) -> str:
        return "".join(symbols).removeprefix("▁") or "▁"


class Gpt2(Pieces):
    """GPT-2's, which its dictionary holds as numbers: shown as text, the space before a word as ▁."""

    def __init__(self, folder: Path) -> None:
        from fairseq.data.encoders.gpt2_bpe_utils import get_encoder

        self._encoder = get_encoder(folder / "encoder.json", folder / "vocab.bpe")
        super().__init__(lambda line: " ".join(map(str, self._encoder.encode(line))))

    def label(self, symbol: str) -> str:
        return self._text([symbol])

    def join(self, symbols: Sequence[str]) -> str:
        return self._text(symbols).removeprefix("▁") or "▁"

    def _text(self, symbols: Sequence[str]) -> str:
        known = self._encoder.decoder
        if not all(symbol.isdecimal() and int(symbol) in known for symbol in symbols):
            return "".join(symbols)  # what a dictionary has beside the numbers
        return self._encoder.decode(list(map(int, symbols))).replace(" ", "▁")


def subwords(data: Path, kind: str, language: str) -> Subwords:
    """What DATA's code, sentencepiece.bpe.model, or encoder.json and vocab.bpe define."""
    names = {
        "subword_nmt": ["code"],
        "sentencepiece": ["sentencepiece.bpe.model"],
        "gpt2": ["encoder.json", "vocab.bpe"],
    }
    for path in [data / name for name in names[kind]]:
        if not path.is_file():
            raise UserError(f"{path}: no such file; the text cannot be split into subwords without it")
    if kind == "gpt2":
        return Gpt2(data)
    if kind == "sentencepiece":
        from sentencepiece import SentencePieceProcessor

        model = SentencePieceProcessor(model_file=str(path))
        return Pieces(lambda line: " ".join(model.encode(line, out_type=str)))
    from ea_data.subwords import segmenter

    vocabulary = data / f"vocabulary.{language}"  # where rare subwords are split again
    allowed = read_lines(vocabulary) if vocabulary.is_file() else None
    return Marked(segmenter(path, allowed).process_line)
