"""Moses' tokeniser and punctuation normaliser, from sacremoses, with the rules that published data went by."""

from __future__ import annotations

import regex
from sacremoses import MosesPunctNormalizer, MosesTokenizer

NON_PRINTING = regex.compile(r"\p{C}")


class Tokenizer(MosesTokenizer):
    """sacremoses' tokenizer with one rule that Moses has and it has not, and with sets where it searches strings.

    Moses splits the full stop off the last word whatever that is: "in the U.S." ends in "U.S" and ".". The text that
    the standard recipes made is like that.
    """

    def __init__(self, lang: str) -> None:
        super().__init__(lang)
        self._lower, self._alpha = frozenset(self.IsLower), frozenset(self.IsAlpha)
        self.NONBREAKING_PREFIXES = frozenset(self.NONBREAKING_PREFIXES)
        self.NUMERIC_ONLY_PREFIXES = frozenset(self.NUMERIC_ONLY_PREFIXES)

    def handles_nonbreaking_prefixes(self, text: str) -> str:
        text = super().handles_nonbreaking_prefixes(text)
        if text[-1:] == "." and text[-2:-1] not in ("", " "):
            return text[:-1] + " ."
        return text

    def islower(self, text: str) -> bool:
        return self._lower.issuperset(text)

    def isanyalpha(self, text: str) -> bool:
        return not self._alpha.isdisjoint(text)


class Normalizer(MosesPunctNormalizer):
    """sacremoses' normaliser as Moses' own script has it, which published data went by."""

    def __init__(self, lang: str) -> None:
        super().__init__(lang, perl_parity=True)

    def clean(self, text: str) -> str:
        """The text normalised, with spaces for characters that do not print, such as soft hyphens."""
        text = self.normalize(text)
        return text if text.isprintable() else NON_PRINTING.sub(" ", text)
