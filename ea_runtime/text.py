"""Raw text to a model's subwords and back, by the PREP.json that data preparation wrote and a run keeps.

It equals data preparation's treatment of text, by the same packages. A test compares the two on awkward
text.
"""

import io
import json
import unicodedata
from collections.abc import Callable
from pathlib import Path

from sacremoses import MosesDetokenizer, MosesPunctNormalizer, MosesTokenizer

#: The most words whose subwords are remembered.
REMEMBERED = 50_000


class _Moses(MosesTokenizer):
    """Moses splits the full stop off the last word of a line, whatever that is; sacremoses does not."""

    def handles_nonbreaking_prefixes(self, text: str) -> str:
        text = super().handles_nonbreaking_prefixes(text)
        return text[:-1] + " ." if text[-1:] == "." and text[-2:-1] not in ("", " ") else text


class Text:
    """Source text to subwords, and the model's subwords to target text.

    Args:
        folder: what holds PREP.json and the code that splits words, such as RUN/prepared.
        source: the language of the text to split, by default the source language.
    """

    def __init__(self, folder: Path, source: str | None = None) -> None:
        names = ("PREP.json", "code", "sentencepiece.bpe.model", "vocabulary.*")
        #: all files that are read
        self.files = sorted(path for name in names for path in folder.glob(name))
        self.prep = json.loads((folder / "PREP.json").read_text(encoding="utf-8"))
        self._rules = self.prep.get("rules", {})
        codes = (source or self.prep["source_lang"], self.prep["target_lang"])
        languages = self.prep.get("languages", {})  # code -> language; before it was there, the code's first part
        spoken, target = (languages.get(code, code.split("_")[0].lower()) for code in codes)
        self._raw = self.prep["tokenizer"] == "none"
        if not self._raw:
            self._tokenizer, self._detokenizer = _Moses(spoken), MosesDetokenizer(target)
        self._normalizer = MosesPunctNormalizer(spoken, perl_parity=True) if self._rules.get("normalise") else None
        self._split = _splitter(folder, self.prep["bpe"], codes[0])

    def subwords(self, line: str) -> str:
        """One line of raw source text as subwords with spaces between them; "" where there is nothing to translate."""
        if self.prep.get("unicode", "NFC") == "NFC":
            line = unicodedata.normalize("NFC", line)
        if self._normalizer:
            line = self._normalizer.normalize(line)
            line = "".join(" " if unicodedata.category(letter)[0] == "C" else letter for letter in line)
        if self._rules.get("plain_apostrophes"):
            line = line.replace("’", "'")
        if self._raw:
            line = " ".join(line.split())
        else:
            dashes = self._rules.get("split_dashes", False)
            escape = self.prep.get("escape", True)
            line = self._tokenizer.tokenize(line, aggressive_dash_splits=dashes, return_str=True, escape=escape)
        return self._split(line.lower() if self.prep["lowercase"] else line)

    def join(self, subwords: str) -> str:
        """Subwords, with spaces between them, as words."""
        if self.prep["bpe"] == "sentencepiece":
            return subwords.replace(" ", "").replace("\u2581", " ").strip()
        return (subwords + " ").replace("@@ ", "").rstrip()

    def detokenize(self, words: str) -> str:
        """Words of the target language, their subwords joined, as people write them."""
        return " ".join(words.split()) if self._raw else self._detokenizer.detokenize(words.split())


def _splitter(folder: Path, kind: str, language: str) -> Callable[[str], str]:
    """The function from words to subwords that the folder's code, or its model of sentencepiece, defines."""
    if kind == "sentencepiece":
        from sentencepiece import SentencePieceProcessor

        model = SentencePieceProcessor(model_file=str(folder / "sentencepiece.bpe.model"))
        return lambda line: " ".join(model.encode(line, out_type=str))
    from subword_nmt.apply_bpe import BPE

    path = folder / f"vocabulary.{language}"  # where rare subwords are split again
    allowed = set(path.read_text(encoding="utf-8").split("\n")) - {""} if path.is_file() else None
    codes = (folder / "code").read_text(encoding="utf-8")
    # A file of its first line alone has no merges; subword-nmt takes it for a damaged one.
    no_merges = codes.startswith("#version:") and "\n" not in codes.strip()
    bpe = BPE(io.StringIO(codes), merges=0 if no_merges else -1, vocab=allowed)

    def split(line: str) -> str:
        # It remembers all words, which a server cannot afford. Another thread may still use the old dictionary.
        if len(bpe.cache) > REMEMBERED:
            bpe.cache = {}
        return bpe.process_line(line)

    return split
