"""Compare two outputs of `translate.sh --nbest N`.

PYTHONPATH=scripts .venv/bin/python -m ea_tools.bench.same_translations ONE OTHER
"""

import argparse
import collections
from pathlib import Path

#: scores of equal translations may differ by this much, and those of a tie
CLOSE, ROUNDING = 1e-3, 1e-5

Hypotheses = list[tuple[str, float]]


def hypotheses(path: str) -> dict[int, Hypotheses]:
    """The hypotheses with their scores, by line number."""
    lists = collections.defaultdict(list)
    # Only a line feed ends a line.
    for line in Path(path).read_bytes().decode().removesuffix("\n").split("\n"):
        number, _, rest = line.partition(" ||| ")
        text, _, score = rest.rpartition(" ||| ")
        lists[int(number)].append((text, float(score)))
    return lists


def kind(one: Hypotheses, other: Hypotheses) -> str:
    """ "same", "tie" (some changed places whose scores differ by rounding), or "different"."""
    if len(one) != len(other) or any(
        not abs(score - twin) <= CLOSE for (_, score), (_, twin) in zip(one, other, strict=False)
    ):
        return "different"
    if all(text == twin for (text, _), (twin, _) in zip(one, other, strict=True)):
        return "same"
    scores = [score for _, score in one]
    tied = any(abs(scores[place] - scores[place - 1]) < ROUNDING for place in range(1, len(scores)))
    return "tie" if tied and sorted(text for text, _ in one) == sorted(text for text, _ in other) else "different"


def main() -> None:
    """Print how many lists are the same, and the first twenty that are not."""
    parser = argparse.ArgumentParser(prog="same_translations", description="Compare outputs of translate.sh --nbest N.")
    for name in ("one", "other"):
        parser.add_argument(name, help="a file of such output")
    args = parser.parse_args()
    first, second = hypotheses(args.one), hypotheses(args.other)
    kinds = {number: kind(first[number], second[number]) for number in first | second}
    pairs = (pair for number in first for pair in zip(first[number], second[number], strict=False))
    differences = [abs(score - twin) for (text, score), (other, twin) in pairs if text == other]
    largest = next((x for x in differences if x != x), max(differences, default=0.0))  # NaN is the largest of all
    counts = collections.Counter(kinds.values())
    totals = [f"{counts[name]} {name}" for name in ("same", "tie", "different")]
    print(*totals, f"scores within {largest:.1e}", sep=", ")
    for number in [number for number in kinds if kinds[number] != "same"][:20]:
        print(kinds[number], number, *zip(first[number], second[number], strict=False), sep="\n  ")


if __name__ == "__main__":
    main()
