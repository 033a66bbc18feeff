"""Every score of the records again, from the translations that are kept: scripts/reproduce.sh scores."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator

from tqdm import tqdm

from ea_artifacts.command import REPO, UserError, listed
from ea_artifacts.preparation import Preparation
from ea_tools.metrics import compute
from ea_tools.tables.records import Records, Score, Text, text_of

#: Tokens of translations are not kept, and those of the same text again differ in a few words.
OF_TOKENS = dict.fromkeys(("tokenised_bleu", "compound_split_bleu"), 0.05)


def check(records: Records) -> str:
    """Compute the scores of all rows whose references are in data/; says of how many.

    COMET is left out, and so are metrics of tokens where the text came in tokens.

    Raises:
        UserError: scores differ, or no row could be checked; the message names each.
    """
    texts = {(text.data.name, text.digest): text for text in _texts(records)}
    counts = Counter[str]()
    faults: list[str] = []
    for row in tqdm(records.rows.values(), unit=" rows", mininterval=0.1 if sys.stderr.isatty() else 10):
        lines, text = records.translations(row), texts.get((row["data"], row["references"]))
        if lines is None or text is None:
            counts["without " + ("translations" if lines is None else f"the references of {row['data']}")] += 1
        else:
            counts["recomputed"] += 1
            faults += differences(row, lines, text)
    said = f"rows: {listed(f'{count} {what}' for what, count in counts.items()) or 'none'}"
    if not counts["recomputed"]:
        raise UserError(f"{records.folder}: {said}; prepare a corpus of these rows in data/, or give other --results")
    if faults:
        raise UserError("\n  ".join([said, *faults]))
    return said


def differences(row: Score, lines: list[str], text: Text) -> Iterator[str]:
    """The scores of a row that are not those of its translations."""
    from ea_runtime.text import words_of

    words = words_of(text.data, text.data.target_lang)
    again = compute(
        tokenised=[words.tokenize(line) for line in lines] if text.data.tokenizer == "moses" else None,
        detokenised=lines,
        references=text.written,
        tokenised_references=text.tokens,
        lowercase=text.data.lowercase,
        tokenizer=row["tokenizer"],
        compounds="compound_split_bleu" in row["scores"],
    )
    for name in filter(again.get, row["scores"]):
        stored, computed = row["scores"][name]["score"], again[name]["score"]
        if abs(stored - computed) > OF_TOKENS.get(name, 1e-6):
            run = f"{row['run']}, {row['subset']}, {row['settings_name']}"
            yield f"{run}: {name}: {stored:.4f} in the records, {computed:.4f} by its translations"


def _texts(records: Records) -> Iterator[Text]:
    splits = {row["subset"].rpartition(".")[2] for row in records.rows.values()}  # of other data than a run's: law.test
    for folder in sorted(path.parent for path in REPO.glob("data/*/PREP.json")):
        target = Preparation.at(folder).target_lang
        yield from (text_of(folder, name) for name in splits if (folder / "raw" / f"{name}.{target}").is_file())
