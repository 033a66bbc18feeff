"""The sample corpus: held-out text is unseen, but made of known words."""

import gzip
import re

from helpers import REPO


def test_held_out_sentences_are_new_and_made_of_known_words():
    known = [set(), set()]
    seen = set()
    for split, number in (("train", 12_000), ("valid", 500), ("test", 500)):
        files = [REPO / f"data-prep/sample/{split}.{language}.gz" for language in ("de", "en")]
        sides = [gzip.decompress(file.read_bytes()).decode().splitlines() for file in files]
        assert [len(side) for side in sides] == [number, number]
        assert not seen.intersection(sides[0]) and len(set(sides[0])) == number
        seen.update(sides[0])
        for side, words in zip(sides, known, strict=True):
            of_side = {word for line in side for word in re.findall(r"\w+", line.lower())}
            assert split == "train" or of_side <= words
            words |= of_side
