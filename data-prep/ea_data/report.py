"""The report on prepared data: PREP.json, a table for the screen, and warnings."""

from __future__ import annotations

from collections.abc import Iterator

POSITIONS = 1024  # fairseq's default --max-source-positions and --max-target-positions, end mark included
#: Shares, in percent, beyond which there is a warning. Short sentences recur in any corpus, whole pairs hardly do.
LEAST_ROUND_TRIP = 99.0  # of the validation text's lines that come back as they were: see round_trip.py
MOST_OVERLAP = {"both": 1.0, "source": 5.0, "target": 5.0}  # of a split's pairs that are in the training text, too
MOST_DUPLICATES = 10.0  # of the training pairs
MOST_UNKNOWN = 1.0  # of a test's subwords
MOST_DECOMPOSED = 1.0  # of the validation text's lines
RED, PLAIN = "\033[31m", "\033[0m"


def table(summary: dict, colour: bool) -> str:
    """The summary as lines for the screen; a number of pairs other than the expected one is red and marked."""
    languages = (summary["source_lang"], summary["target_lang"])
    heads = ["split", "pairs", "expected", *(f"{what} {lang}" for what in ("subwords", "unk %") for lang in languages)]
    lines = [f"\n{heads[0]:<28}" + "".join(f"{head:>14}" for head in heads[1:])]
    for split, facts in summary["splits"].items():
        name = split if facts["name"] == split else f"{split} ({facts['name'][:20]})"
        cells = [f"{facts['pairs']:,}", f"{facts['expected']:,}" if facts["expected"] else "-"]
        cells += [f"{facts['subwords'][lang]:,}" for lang in languages]
        cells += [f"{facts['unknown_percent'][lang]:.2f}" for lang in languages]
        line = f"{name:<28}" + "".join(f"{cell:>14}" for cell in cells)
        if facts["expected"] and facts["pairs"] != facts["expected"]:
            line = f"{RED}{line}{PLAIN}" if colour else line
            line += "  <- not as expected"
        lines.append(line)
    for lang in languages:
        words = summary["train_words"][lang]
        lines.append(f"train {lang}: {words['words']:,} words, {words['types']:,} types")
    types = summary["dictionary"]
    sizes = types if isinstance(types, dict) else {"both languages": types}
    lines += [f"dictionary, {of}: {size:,} types" for of, size in sizes.items()]
    for counts in summary["filters"]:
        reasons = ", ".join(f"{number:,} {reason}" for reason, number in counts["dropped"].items()) or "nothing dropped"
        lines.append(
            f"length filter on {counts['on']}, {counts['split']}: "
            f"{counts['in']:,} pairs in, {counts['out']:,} out; {reasons}"
        )
    for split, shared in summary.get("overlap_with_training", {}).items():
        numbers = ", ".join(f"{number:,} {side}" for side, number in shared.items())
        lines.append(f"{split}: sentences that are in the training text, too: {numbers}")
    if "duplicate_training_pairs" in summary:
        lines.append(f"training pairs that repeat another: {summary['duplicate_training_pairs']:,}")
    return "\n".join(lines) + "\n"


def warnings(summary: dict) -> list[str]:
    """The warnings before training."""
    checks = (_of_splits, _overlap, _duplicates, _broken, _decomposed)
    return [f"warning: {text}" for check in checks for text in check(summary)]


def _of_splits(summary: dict) -> Iterator[str]:
    """Sentences that are too long or empty, and unknown subwords."""
    for split, facts in summary["splits"].items():
        for lang, longest in facts["longest"].items():
            if longest + 1 > POSITIONS:
                yield (
                    f"{split}: its longest {lang} sentence has {longest:,} subwords, and fairseq's models take "
                    f"{POSITIONS:,}; fairseq leaves it out of training, and stops at it elsewhere without "
                    "--skip-invalid-size-inputs-valid-test"
                )
        for lang, number in facts.get("empty", {}).items():
            if number:
                effect = ": as references, BLEU counts their translations as wrong, and chrF leaves them out"
                yield (
                    f"{split}: {number:,} of its {facts['pairs']:,} {lang} sentences are empty"
                    + effect * (lang == summary["target_lang"])
                )
        for lang, percent in facts["unknown_percent"].items():
            if percent > MOST_UNKNOWN:
                yield (
                    f"{split}: {percent:.1f}% of its {lang} subwords are not in the dictionary (more than "
                    f"{MOST_UNKNOWN:g}%), and unknown to any model: is it other text, or tokenised otherwise?"
                )


def _overlap(summary: dict) -> Iterator[str]:
    for split, shared in summary.get("overlap_with_training", {}).items():
        pairs = max(1, summary["splits"][split]["pairs"])
        for side, most in MOST_OVERLAP.items():
            percent = 100 * shared[side] / pairs
            if percent > most:
                sentences = "pairs" if side == "both" else f"{side} sentences"
                yield (
                    f"{split}: {percent:.1f}% of its {sentences} are in the training text, too (more than {most:g}%): "
                    "scores will flatter; custom.sh --drop-test-overlap takes them out of the training text"
                )
                break


def _duplicates(summary: dict) -> Iterator[str]:
    number = summary.get("duplicate_training_pairs", 0)
    percent = 100 * number / max(1, summary["splits"]["train"]["pairs"])
    if percent > MOST_DUPLICATES:
        yield f"train: {number:,} pairs ({percent:.1f}%, more than {MOST_DUPLICATES:g}%) repeat another"


def _broken(summary: dict) -> Iterator[str]:
    """Text that does not come back from tokenising and detokenising."""
    faults = {
        "given": "are in the tokens that Moses makes of them; text to translate becomes Moses' tokens, and the model "
        "will read others than it was trained on",
        "moses": "come back from tokenising and detokenising as they were, and translations will not, either; "
        "custom.sh --tokenizer none takes the text as it is",
        "none": "come back from tokenising and detokenising as they were, and translations will not, either",
    }
    for lang, side in summary.get("round_trip", {}).items():
        percent = 100 * side["same"] / max(1, side["lines"])
        if percent < LEAST_ROUND_TRIP:
            examples = "".join(f"\n    {text}\n -> {back}" for text, back in side["examples"])
            yield (
                f"valid: only {percent:.1f}% of its {lang} lines (less than {LEAST_ROUND_TRIP:g}%) "
                f"{faults[summary['tokenizer']]}; for example:{examples}"
            )


def _decomposed(summary: dict) -> Iterator[str]:
    if summary.get("unicode") == "as given":
        yield (
            f"valid: more than {MOST_DECOMPOSED:g}% of its lines have letters and accents as separate characters "
            "(not in Unicode's form NFC); text to translate keeps its form too, and must be like that"
        )


def unicode_form(summary: dict, nfc: bool) -> str:
    """The form of Unicode that text to translate gets: "NFC", or "as given" where the corpus is in another.

    Args:
        summary: has the counts of `round_trip`.
        nfc: whether the corpus has been brought to NFC.
    """
    sides = summary["round_trip"].values()
    most = MOST_DECOMPOSED / 100
    return "NFC" if nfc or all(side["decomposed"] <= most * side["lines"] for side in sides) else "as given"
