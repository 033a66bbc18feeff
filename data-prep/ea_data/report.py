"""The report on prepared data: PREP.json's numbers for the screen, and warnings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ea_artifacts.files import json_text

POSITIONS = 1024  # fairseq's default --max-source-positions and --max-target-positions, end mark included
#: Shares, in percent, beyond which there is a warning. Short sentences recur in any corpus, whole pairs hardly do.
LEAST_ROUND_TRIP = 99.0  # of the validation text's lines that come back as they were: see round_trip.py
MOST_OVERLAP = {"both": 1.0, "source": 5.0, "target": 5.0}  # of a split's pairs that are in the training text, too
MOST_DUPLICATES = 10.0  # of the training pairs
MOST_UNKNOWN = 1.0  # of a test's subwords
MOST_DECOMPOSED = 1.0  # of the validation text's lines
#: Entries that the screen shows as PREP.json has them.
SHOWN = ("train_words", "dictionary", "filters", "overlap_with_training", "duplicate_training_pairs")
BACK = "come back from tokenising and detokenising as they were, and translations will not, either"
#: The warning for each tokenizer goes on like this.
BROKEN = {
    "given": "are in the tokens that Moses makes of them; text to translate becomes Moses' tokens, and the model will "
    "read others than it was trained on",
    "moses": f"{BACK}; custom.sh --tokenizer none takes the text as it is",
    "none": BACK,
}


def table(summary: dict) -> str:
    """The summary as lines for the screen; a number of pairs other than the expected one is marked."""
    languages = (summary["source_lang"], summary["target_lang"])
    heads = ["pairs", "expected", *(f"{what} {lang}" for what in ("subwords", "unk %") for lang in languages)]
    lines = [f"\n{'split':<28}" + "".join(f"{head:>14}" for head in heads)]
    for split, facts in summary["splits"].items():
        name = split if facts["name"] == split else f"{split} ({facts['name'][:20]})"
        cells = [f"{facts['pairs']:,}", f"{facts['expected']:,}" if facts["expected"] else "-"]
        cells += [f"{facts['subwords'][lang]:,}" for lang in languages]
        cells += [f"{facts['unknown_percent'][lang]:.2f}" for lang in languages]
        line = f"{name:<28}" + "".join(f"{cell:>14}" for cell in cells)
        if facts["expected"] and facts["pairs"] != facts["expected"]:
            line += "  <- not as expected"
        lines.append(line)
    return "\n".join([*lines, json_text({name: summary[name] for name in SHOWN})])


def warnings(summary: dict) -> list[str]:
    """The warnings before training."""
    texts = [text for split, facts in summary["splits"].items() for text in _of_split(summary, split, facts)]
    texts += [*_of_training(summary), *_of_validation(summary)]
    return [f"warning: {text}" for text in texts]


def _of_split(summary: dict, split: str, facts: dict[str, Any]) -> Iterator[str]:
    """Sentences that are too long or empty, unknown subwords, and sentences of the training text."""
    for lang, longest in facts["longest"].items():
        if longest + 1 > POSITIONS:
            yield (
                f"{split}: its longest {lang} sentence has {longest:,} subwords, and fairseq's models take "
                f"{POSITIONS:,}; fairseq leaves it out of training, and stops at it elsewhere without "
                "--skip-invalid-size-inputs-valid-test"
            )
        if number := facts["empty"][lang]:
            effect = ": as references, BLEU counts their translations as wrong, and chrF leaves them out"
            text = f"{split}: {number:,} of its {facts['pairs']:,} {lang} sentences are empty"
            yield text + effect * (lang == summary["target_lang"])
        if (percent := facts["unknown_percent"][lang]) > MOST_UNKNOWN:
            yield (
                f"{split}: {percent:.1f}% of its {lang} subwords are not in the dictionary (more than "
                f"{MOST_UNKNOWN:g}%), and unknown to any model: is it other text, or tokenised otherwise?"
            )
    shared = summary["overlap_with_training"].get(split, {})
    for side, most in MOST_OVERLAP.items():
        if (percent := 100 * shared.get(side, 0) / facts["pairs"]) > most:
            sentences = "pairs" if side == "both" else f"{side} sentences"
            yield (
                f"{split}: {percent:.1f}% of its {sentences} are in the training text, too (more than {most:g}%): "
                "scores will flatter; custom.sh --drop-test-overlap takes them out of the training text"
            )
            break


def _of_training(summary: dict) -> Iterator[str]:
    number = summary["duplicate_training_pairs"]
    percent = 100 * number / summary["splits"]["train"]["pairs"]
    if percent > MOST_DUPLICATES:
        yield f"train: {number:,} pairs ({percent:.1f}%, more than {MOST_DUPLICATES:g}%) repeat another"


def _of_validation(summary: dict) -> Iterator[str]:
    """Text that does not come back from tokenising and detokenising, and letters apart from their accents."""
    for lang, side in summary["round_trip"].items():
        percent = 100 * side["same"] / side["lines"]
        if percent < LEAST_ROUND_TRIP:
            examples = "".join(f"\n    {text}\n -> {back}" for text, back in side["examples"])
            yield (
                f"valid: only {percent:.1f}% of its {lang} lines (less than {LEAST_ROUND_TRIP:g}%) "
                f"{BROKEN[summary['tokenizer']]}; for example:{examples}"
            )
    if summary["unicode"] == "as given":
        yield (
            f"valid: more than {MOST_DECOMPOSED:g}% of its lines have letters and accents as separate characters "
            "(not in Unicode's form NFC); text to translate keeps its form too, and must be like that"
        )


def unicode_form(sides: dict[str, dict[str, Any]], nfc: bool) -> str:
    """The form of Unicode that text to translate gets: "NFC", or "as given" where the corpus is in another.

    Args:
        sides: the counts of round_trip.py.
        nfc: whether the corpus has been brought to NFC.
    """
    most = MOST_DECOMPOSED / 100
    return "NFC" if nfc or all(side["decomposed"] <= most * side["lines"] for side in sides.values()) else "as given"
