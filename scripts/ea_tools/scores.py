"""Scores of translations, all by sacreBLEU: what is compared with what is decided here, and nothing is computed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # imported where it is used: plans and tables only need the labels
    from sacrebleu.metrics.base import Metric

# Neither scorer's tokeniser can find this in a reference: an unknown word earns nothing, whatever the reference holds.
UNKNOWN = "\N{REPLACEMENT CHARACTER}"

LABELS = {
    "sacrebleu": "sacreBLEU",
    "chrf": "chrF",
    "tokenised_bleu": "tokenised BLEU",
    "compound_split_bleu": "compound-split BLEU",
}


def score(
    *,
    tokenised: Sequence[str],
    detokenised: Sequence[str],
    references: Sequence[str],
    tokenised_references: Sequence[str],
    lowercase: bool,
    compounds: bool = False,
) -> dict[str, dict[str, Any]]:
    """Every kind of score with its signature. The four lists are lines of the same sentences.

    sacrebleu            detokenised against raw; with a 95% confidence interval from 1000 bootstrap samples
    chrf                 the same text, by characters
    tokenised_bleu       Moses tokens on both sides, what the papers' tables hold
    compound_split_bleu  the same with hyphenated compounds taken apart, as the papers on WMT En-De do

    Args:
        tokenised: translations in Moses tokens, as the model gives them.
        detokenised: the same translations as people write text.
        references: as people wrote them.
        tokenised_references: the references in Moses tokens.
        lowercase: whether case is ignored.
        compounds: whether compound_split_bleu is wanted.
    """
    from sacrebleu.metrics import BLEU, CHRF

    raw, tokens = _without_unknown(detokenised), _without_unknown(tokenised)
    scores = {
        "sacrebleu": _result(BLEU(lowercase=lowercase), raw, references),
        "chrf": _result(CHRF(lowercase=lowercase), raw, references),
        "tokenised_bleu": _result(_token_bleu(lowercase), tokens, tokenised_references),
    }
    if compounds:
        split = [split_compounds(lines) for lines in (tokens, tokenised_references)]
        scores["compound_split_bleu"] = _result(_token_bleu(lowercase), *split)
    interval = BLEU(lowercase=lowercase)
    resampled = interval.corpus_score(raw, [references], n_bootstrap=1000)
    scores["sacrebleu"]["interval"] = {
        "mean": resampled._mean,
        "half_width": resampled._ci,
        "signature": str(interval.get_signature()),
    }
    return scores


def validation_flags(bpe: str, decides: bool = True) -> dict[str, str | bool]:
    """Flags of fairseq-train: BLEU of beam search on detokenised text at each validation, and some of the translations.

    fairseq takes sacreBLEU too, on text that it detokenises itself. It heeds case, unlike `score` for lower-cased data,
    where it makes no difference among the model's own translations but lowers the score.

    Args:
        bpe: the kind of subwords, as PREP.json names it.
        decides: whether BLEU, and not the loss, says which checkpoint is the best, and when --patience ends.
    """
    flags = {
        "eval-bleu": True,
        "eval-bleu-args": '{"beam": 5, "max_len_a": 1.2, "max_len_b": 10}',
        "eval-bleu-detok": "moses",
        "eval-bleu-remove-bpe": bpe,
        "eval-bleu-print-samples": True,
    }
    return flags | ({"best-checkpoint-metric": "bleu", "maximize-best-checkpoint-metric": True} if decides else {})


def _without_unknown(lines: Sequence[str]) -> list[str]:
    """The lines with what no reference holds in the place of unknown words."""
    return [line.replace("<unk>", UNKNOWN) for line in lines]


def _token_bleu(lowercase: bool) -> Metric:
    from sacrebleu.metrics import BLEU

    return BLEU(lowercase=lowercase, tokenize="none", force=True)


def _result(metric: Metric, hypotheses: Sequence[str], references: Sequence[str]) -> dict[str, Any]:
    result = metric.corpus_score(hypotheses, [references])
    return {"score": result.score, "detail": str(result), "signature": str(metric.get_signature())}


def split_compounds(lines: Sequence[str]) -> list[str]:
    """Words at hyphens, as the papers on En-De count them: "Rinder-Steak" is three tokens, of which the hyphen is one.

    What aggressive tokenisation has split already ("Rinder @-@ Steak") is joined first, so that both come out alike.
    """
    return [re.sub(r"(\S)-(\S)", r"\1 ##AT##-##AT## \2", line.replace(" @-@ ", "-")) for line in lines]


def compare(
    *,
    system: Sequence[str],
    baseline: Sequence[str],
    references: Sequence[str],
    lowercase: bool,
    kinds: Sequence[str] = ("sacrebleu", "chrf"),
) -> dict[str, Any]:
    """Paired bootstrap test of two systems' detokenised translations: {"identical": ..., "sacrebleu": {...}, ...}.

    p is the chance of a difference at least this large between two systems that are equally good. Of two outputs that
    are identical it is 1: the test, which counts differences of at least 0, would make it the smallest it knows.
    """
    from sacrebleu.metrics import BLEU, CHRF
    from sacrebleu.significance import PairedTest

    systems = [("baseline", _without_unknown(baseline)), ("system", _without_unknown(system))]
    identical = list(system) == list(baseline)
    tests: dict[str, Any] = {"identical": identical}
    for kind in kinds:
        metric = (BLEU if kind == "sacrebleu" else CHRF)(lowercase=lowercase)
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
