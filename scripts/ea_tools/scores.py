"""Scores of translations, all by sacreBLEU: what is compared with what is decided here, and nothing is computed."""

import re

from sacrebleu.metrics import BLEU, CHRF
from sacrebleu.significance import PairedTest

# Neither scorer's tokeniser can find this in a reference: an unknown word earns nothing, whatever the reference holds.
UNKNOWN = "\N{REPLACEMENT CHARACTER}"

LABELS = {
    "sacrebleu": "sacreBLEU",
    "chrf": "chrF",
    "tokenised_bleu": "tokenised BLEU",
    "compound_split_bleu": "compound-split BLEU",
}


def score(tokenised, detokenised, references, tokenised_references, lowercase, compounds=False):
    """Every kind of score with its signature; the arguments are lists of lines.

    sacrebleu            detokenised against raw; with a 95% confidence interval from 1000 bootstrap samples
    chrf                 the same text, by characters
    tokenised_bleu       Moses tokens on both sides, what the papers' tables hold
    compound_split_bleu  the same with hyphenated compounds taken apart, as the papers on WMT En-De do
    """
    raw = [line.replace("<unk>", UNKNOWN) for line in detokenised]
    tokens = [line.replace("<unk>", UNKNOWN) for line in tokenised]
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


def _token_bleu(lowercase):
    return BLEU(lowercase=lowercase, tokenize="none", force=True)


def _result(metric, hypotheses, references):
    found = metric.corpus_score(hypotheses, [references])
    return {"score": found.score, "detail": str(found), "signature": str(metric.get_signature())}


def split_compounds(lines):
    """Words at hyphens, as the papers on En-De count them: "Rinder-Steak" is three tokens, of which the hyphen is one.

    What aggressive tokenisation has split already ("Rinder @-@ Steak") is joined first, so that both come out alike.
    """
    return [re.sub(r"(\S)-(\S)", r"\1 ##AT##-##AT## \2", line.replace(" @-@ ", "-")) for line in lines]


def compare(mine, theirs, references, lowercase, kinds=("sacrebleu", "chrf")):
    """Paired bootstrap test, `theirs` being the baseline: {"sacrebleu": {...}, "chrf": {...}}.

    p is the chance of a difference at least this large between two systems that are equally good.
    """
    both = {"baseline": theirs, "system": mine}
    systems = [(name, [line.replace("<unk>", UNKNOWN) for line in lines]) for name, lines in both.items()]
    found = {}
    for kind in kinds:
        metric = (BLEU if kind == "sacrebleu" else CHRF)(lowercase=lowercase)
        signatures, results = PairedTest(systems, {kind: metric}, [references], test_type="bs", n_samples=1000)()
        (name,) = signatures
        baseline, system = results[name]
        found[kind] = {
            "baseline": baseline.score,
            "difference": system.score - baseline.score,
            "p": system.p_value,
            "signature": str(signatures[name]),
        }
    return found
