"""Codes of languages, as file names have them: de, deu, de_AT, zho_Hans."""

from __future__ import annotations

from langcodes import Language, standardize_tag, tag_is_valid

from ea_artifacts.preparation import first_part

#: Languages that Moses has rules for, and writes back as it found them. It has lists for some Indian languages and for
#: Chinese too, but splits off their vowel signs and full stops, or does not split their words at all.
MOSES_LANGUAGES = frozenset("ca cs de el en es et fi fr ga hu is it lt lv nl pl pt ro ru sk sl sv tdt".split())


def known(code: str) -> bool:
    """Whether ISO 639 has the language of this code, with two letters or three."""
    return tag_is_valid(first_part(code))


def base_language(code: str) -> str:
    """The language of a code, with two letters where it has such a code: deu and de_AT -> de, zho_Hans -> zh."""
    language = first_part(code)
    return standardize_tag(language, macro=True).split("-")[0] if known(language) else language


def script(code: str) -> str | None:
    """The script of a code's text, which a code without one implies: zho -> Hans, zh_TW -> Hant, zho_Latn -> Latn."""
    return Language.get(code if tag_is_valid(code) else base_language(code)).maximize().script if known(code) else None


def default_tokenizer(*codes: str) -> str:
    """The tokenizer for text in these languages: "moses" where Moses has rules for all of them, else "none"."""
    return "moses" if MOSES_LANGUAGES.issuperset(map(base_language, codes)) else "none"
