"""Metrics of translations, by sacreBLEU and COMET: this file chooses the texts to compare."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ea_artifacts.command import UserError, say
from ea_artifacts.preparation import Preparation
from ea_data.languages import known, script

if TYPE_CHECKING:  # imported where it is used: plans and tables only need the labels
    from sacrebleu.metrics import BLEU
    from sacrebleu.metrics.base import Metric

#: Stands for <unk> in translations: no reference holds it, so an unknown word earns nothing.
UNKNOWN = "\N{REPLACEMENT CHARACTER}"

LABELS = {
    "sacrebleu": "sacreBLEU",
    "chrf": "chrF",
    "tokenised_bleu": "tokenised BLEU",
    "compound_split_bleu": "compound-split BLEU",
    "exact_match": "exact match",
    "comet": "COMET",
}

#: sacreBLEU's own tokeniser for a script (ISO 15924) of which 13a finds no words, or other words; 13a for all others.
TOKENIZERS = {
    **dict.fromkeys(("Hans", "Hant", "Hani"), "zh"),
    "Jpan": "ja-mecab",
    **dict.fromkeys(("Kore", "Hang"), "ko-mecab"),
}
#: Other scripts without spaces between words: sacreBLEU has no tokeniser for them.
WITHOUT_SPACES = frozenset("Khmr Laoo Mymr Thai Tibt".split())


def written_with_spaces(language: str) -> bool:
    """Whether text in this language has spaces between its words."""
    return script(language) not in WITHOUT_SPACES | {"Hans", "Hant", "Hani", "Jpan"}


def tokenizer_for(language: str) -> str:
    """The tokeniser that sacreBLEU takes for text in this language by default."""
    return TOKENIZERS.get(script(language) or "", "13a")


def check_tokenizer(tokenizer: str, language: str) -> None:
    """Refuse a tokeniser of sacreBLEU that is not there; warn of one that finds no words in this language."""
    bleu(False, tokenizer)
    if tokenizer == "13a" and not known(language):
        say(
            f"warning: {language}: is not an ISO 639 language code, such as de, deu or zho_Hans; scored as one with "
            "spaces between words, by sacreBLEU's tokeniser 13a; --tok chooses another"
        )
    if script(language) in WITHOUT_SPACES and tokenizer in ("13a", "intl", "none"):
        say(
            f"warning: sacreBLEU's tokeniser {tokenizer} splits words at spaces, and {language} has few: use chrF, "
            "or choose --tok char or --tok flores200"
        )


def bleu(lowercase: bool, tokenizer: str) -> BLEU:
    """sacreBLEU's BLEU with this tokeniser, or an error that names the missing package."""
    import sacrebleu
    from sacrebleu.metrics import BLEU

    if tokenizer not in BLEU.TOKENIZERS:
        raise UserError(f"--tok {tokenizer}: sacreBLEU has {', '.join(BLEU.TOKENIZERS)}")
    try:
        return BLEU(lowercase=lowercase, tokenize=tokenizer)
    except (RuntimeError, ImportError, OSError) as error:  # its package, or its model, which it downloads
        extra = tokenizer.removesuffix("-mecab")
        package = f"'sacrebleu[{extra}]=={sacrebleu.__version__}'"
        remedy = "check the network" if extra == tokenizer else f"install it: {sys.executable} -m pip install {package}"
        raise UserError(f"--tok {tokenizer}: {error}; {remedy} (or choose --tok char)") from error


def compute(
    *,
    tokenised: Sequence[str] | None,
    detokenised: Sequence[str],
    references: Sequence[str],
    tokenised_references: Sequence[str],
    lowercase: bool,
    tokenizer: str = "13a",
    compounds: bool = False,
    exact: bool = False,
) -> dict[str, dict[str, Any]]:
    """Every metric with its signature. The four lists are lines of the same sentences.

    sacrebleu            detokenised against raw; with a 95% confidence interval from 1000 bootstrap samples
    chrf                 the same text, by characters
    tokenised_bleu       Moses tokens on both sides, as in the papers' tables
    compound_split_bleu  the same with hyphenated compounds taken apart, as the papers on WMT En-De do
    exact_match          percent of the lines whose tokens are the reference's, as CodeXGLUE scores code

    Args:
        tokenised: translations in Moses tokens; None where the model writes raw text, which has no tokens.
        detokenised: the same translations as people write text.
        references: as people wrote them.
        tokenised_references: the references in Moses tokens.
        lowercase: whether case is ignored.
        tokenizer: sacreBLEU's, for its BLEU.
        compounds: whether to add compound_split_bleu.
        exact: whether to add exact_match.
    """
    from sacrebleu.metrics import BLEU, CHRF

    raw = _without_unknown(detokenised)
    interval = bleu(lowercase, tokenizer)
    resampled = interval.corpus_score(raw, [references], n_bootstrap=1000)
    metrics = {
        "sacrebleu": _result(bleu(lowercase, tokenizer), raw, references),
        "chrf": _result(CHRF(lowercase=lowercase), raw, references),
    }
    metrics["sacrebleu"]["interval"] = {
        "mean": resampled._mean,
        "half_width": resampled._ci,
        "signature": str(interval.get_signature()),
    }
    if tokenised is not None:
        pairs: dict[str, Sequence[Sequence[str]]] = {
            "tokenised_bleu": (_without_unknown(tokenised), tokenised_references)
        }
        if compounds:
            pairs["compound_split_bleu"] = tuple(map(split_compounds, pairs["tokenised_bleu"]))
        for name, sides in pairs.items():
            metrics[name] = _result(BLEU(lowercase=lowercase, tokenize="none", force=True), *sides)
        if exact:
            metrics["exact_match"] = exact_match(*pairs["tokenised_bleu"])
    return metrics


def comet_command() -> str:
    """The path of COMET's command, or an error with the way to get it."""
    command = shutil.which("comet-score")
    if command is None:
        raise UserError(
            "--comet needs the command comet-score, which is not on the PATH; install it apart from fairseq, whose "
            "packages have other versions: pipx install unbabel-comet"
        )
    return command


def comet(
    model: str, sources: Sequence[str], translations: Sequence[str], references: Sequence[str], gpu: bool
) -> dict[str, Any]:
    """COMET of the system, times 100, as a package that the user installs computes it.

    Args:
        model: COMET's name of a model, such as Unbabel/wmt22-comet-da, or its file.
        sources, translations, references: as people write text.
        gpu: whether to run on a GPU.
    """
    texts = {"sources": sources, "translations": translations, "references": references}
    with tempfile.TemporaryDirectory() as folder:
        command = [comet_command()]
        for name, lines in texts.items():
            path = Path(folder) / name
            # COMET reads lines as Python does, for which a lone carriage return ends one, too.
            path.write_text("".join(line.replace("\r", " ") + "\n" for line in lines), encoding="utf-8")
            command += [f"--{name}", str(path)]
        command += ["--model", model, "--gpus", str(int(gpu)), "--quiet", "--only_system"]
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False)
    scores = re.findall(r"\tscore: (-?[\d.]+)\s*$", done.stdout, re.MULTILINE)
    if done.returncode or len(scores) != 1:
        output = (done.stderr or done.stdout).strip() or "no message"
        raise UserError(f"--comet {model}: comet-score ended with status {done.returncode}: {output.splitlines()[-1]}")
    return {"score": 100 * float(scores[0]), "detail": f"COMET = {scores[0]}", "signature": f"model:{model}|times:100"}


#: Flags of fairseq-train by which BLEU, and not the loss, says which checkpoint is the best.
DECIDED_BY_BLEU: dict[str, str | bool] = {"best-checkpoint-metric": "bleu", "maximize-best-checkpoint-metric": True}


def validation_flags(data: Preparation, decides: bool = True) -> dict[str, str | bool]:
    """Flags of fairseq-train: BLEU of beam search on detokenised text at each validation, and some of the translations.

    fairseq takes sacreBLEU too, on text that it detokenises itself. Unlike `compute` for lower-cased data, it minds
    case. For a corpus of raw text (tokenizer "none") BLEU is of subwords, since fairseq splits words at spaces.

    Args:
        data: of the training.
        decides: whether BLEU, and not the loss, says which checkpoint is the best, and when --patience ends.
    """
    words = {"eval-bleu-detok": "moses", "eval-bleu-remove-bpe": data.bpe}
    flags: dict[str, str | bool] = {
        "eval-bleu": True,
        "eval-bleu-args": '{"beam": 5, "max_len_a": 1.2, "max_len_b": 10}',
        **({"eval-tokenized-bleu": True} if data.tokenizer == "none" else words),
        "eval-bleu-print-samples": True,
    }
    return flags | (DECIDED_BY_BLEU if decides else {})


def _without_unknown(lines: Sequence[str]) -> list[str]:
    return [line.replace("<unk>", UNKNOWN) for line in lines]


def _result(metric: Metric, hypotheses: Sequence[str], references: Sequence[str]) -> dict[str, Any]:
    result = metric.corpus_score(hypotheses, [references])
    return {"score": result.score, "detail": str(result), "signature": str(metric.get_signature())}


def exact_match(hypotheses: Sequence[str], references: Sequence[str]) -> dict[str, Any]:
    """Percent of the lines that are equal but for white space."""
    equal = sum(one.split() == other.split() for one, other in zip(hypotheses, references, strict=True))
    score = 100 * equal / len(references)
    return {"score": score, "detail": f"{equal} of {len(references)}", "signature": "tokens:equal"}


def split_compounds(lines: Sequence[str]) -> list[str]:
    """Words at hyphens, as the papers on En-De count them: "Rinder-Steak" is three tokens, of which the hyphen is one.

    Words that aggressive tokenisation has split ("Rinder @-@ Steak") are joined first, so that both come out alike.
    """
    return [re.sub(r"(\S)-(\S)", r"\1 ##AT##-##AT## \2", line.replace(" @-@ ", "-")) for line in lines]


def compare(
    *,
    system: Sequence[str],
    baseline: Sequence[str],
    references: Sequence[str],
    lowercase: bool,
    tokenizer: str = "13a",
    kinds: Sequence[str] = ("sacrebleu", "chrf"),
) -> dict[str, Any]:
    """Paired bootstrap test of two systems' detokenised translations: {"identical": ..., "sacrebleu": {...}, ...}.

    p is the chance of a difference at least this large between two systems that are equally good. It is 1 for identical
    outputs: the test counts differences of at least 0, and would give its smallest p.
    """
    from sacrebleu.metrics import CHRF
    from sacrebleu.significance import PairedTest

    systems = [("baseline", _without_unknown(baseline)), ("system", _without_unknown(system))]
    identical = list(system) == list(baseline)
    tests: dict[str, Any] = {"identical": identical}
    for kind in kinds:
        metric = bleu(lowercase, tokenizer) if kind == "sacrebleu" else CHRF(lowercase=lowercase)
        signatures, results = PairedTest(systems, {kind: metric}, [references], test_type="bs", n_samples=1000)()
        (name,) = signatures
        of_baseline, of_system = results[name]
        tests[kind] = {
            "baseline": of_baseline.score,
            "difference": of_system.score - of_baseline.score,
            "p": 1.0 if identical else of_system.p_value,
            "signature": str(signatures[name]),
        }
    return tests
