"""Text in any script comes back as the same text: raw text, subwords, joined again; else there is a warning."""

import json
import unicodedata

import pytest
from helpers.data_toy import corpus_of, prepared, read, recipe, uniform

from ea_artifacts.preparation import Preparation
from ea_data import report
from ea_data.languages import default_tokenizer
from ea_runtime.text import Text, words
from ea_tools.translating import evaluate

#: language -> sentences that tokenisers for European languages break; "emoji": pictures of several characters
SENTENCES = {
    "th": "แมวน้ำกินปลาในทะเล|วันนี้ฝนตกหนักมาก|ฉันชอบดื่มน้ำส้ม|เด็กๆ เล่นอยู่ในสวน|ขอบคุณที่ช่วยฉันเมื่อวานนี้",
    "ja": "猫が窓のそばで寝ています。|今日は とても寒いですね。|「ありがとう」と彼は言った。|"
    "ガラスのコップを買いました。|駅まで歩いて十分です。",
    "emoji": "our family 👨‍👩‍👧‍👦 is here ❤️|well done 👍🏽 my friend 🎉|she is a pilot 👩🏾‍✈️ now|"
    "greetings from Greece 🇬🇷 and Iran 🇮🇷|a rainbow 🏳️‍🌈 after the rain 🌧️",
}
SENTENCES = {language: lines.split("|") for language, lines in SENTENCES.items()}


def alike(folder, source, target, lines, **changed):
    """A small corpus with `lines` on both sides everywhere, prepared in this process; returns (folder, PREP.json)."""
    uniform(folder / "raw", lines, (source, target))
    corpus = recipe(source, target, **{"filter_on": "subwords", "nfc": True, "merges": 400} | changed)
    return folder / "out", prepared(corpus, folder / "raw", folder / "out")


RAW = {"tokenizer": "none", "bpe": "sentencepiece"}


@pytest.mark.parametrize("language", SENTENCES)
def test_raw_text_survives(tmp_path, language):
    """Prepared with the tokenizer "none", text to translate becomes subwords that join to the very same text."""
    lines = SENTENCES[language]
    data, prep = alike(tmp_path, "xx", "yy", lines, **RAW)
    assert prep["round_trip"]["xx"] == {"lines": len(lines), "same": len(lines), "decomposed": 0, "examples": []}
    translator = Text(data)
    for line in lines:
        assert translator.detokenize(translator.join(translator.subwords(line))) == " ".join(line.split())
    references, _ = evaluate.references(data / "raw/test.yy", Preparation.at(data))
    assert references == lines


def test_text_that_moses_breaks_gives_a_warning(tmp_path):
    """The same text by Moses: the report counts the lines that do not come back and shows some."""
    _, prep = alike(tmp_path, "xx", "yy", SENTENCES["th"], tokenizer="moses", merges=20)
    side = prep["round_trip"]["xx"]
    assert side["same"] < 0.99 * side["lines"]
    warning = next(text for text in report.warnings(prep) if "come back" in text)
    before, after = side["examples"][0]
    assert before != after
    assert f"    {before}\n -> {after}" in warning
    assert "--tokenizer none" in warning


def test_moses_is_the_default_where_it_has_rules():
    for pair in ("de en", "de_AT el", "deu eng", "ger_Latn fre", "lvs_Latn ekk"):
        assert default_tokenizer(*pair.split()) == "moses"
    for language in "th km lo my zh yue ja ko fa ar hi zh_CN zho_Hans tha xx".split():
        assert default_tokenizer("en", language) == default_tokenizer(language, "en") == "none"


@pytest.mark.parametrize(
    ("options", "tokenizer", "bpe", "nfc"),
    [
        ("--target-lang th", "none", "sentencepiece", True),
        ("--target-lang en", "moses", "subword_nmt", True),
        ("--target-lang en --tokenizer none", "none", "sentencepiece", True),
        ("--target-lang th --tokenised", "given", "subword_nmt", False),
    ],
)
def test_the_tokenizer_follows_from_the_language(options, tokenizer, bpe, nfc):
    rules = corpus_of(*options.split()).rules
    assert (rules.tokenizer, rules.bpe, rules.nfc) == (tokenizer, bpe, nfc)


def test_an_unknown_code_gives_a_warning(capsys):
    corpus_of("--source-lang", "deu", "--target-lang", "german")
    said = capsys.readouterr().err
    assert "--target-lang german" in said and "--source-lang" not in said


AWKWARD = ["I don't know, z.B. Nr. 7 isn't", "Das ist ca. 3 km weit.", "No. 5 is the dogs' own.", "Dr. No can't, e.g."]


def test_a_language_is_prepared_alike_by_any_of_its_codes(tmp_path):
    alike(tmp_path / "short", "de", "en", AWKWARD, merges=20)
    long, prep = alike(tmp_path / "long", "deu_Latn", "eng", AWKWARD, merges=20)
    short_tokens, long_tokens = (tmp_path / f"{name}/out.work/1-tokens" for name in ("short", "long"))
    for one, other in (("de", "deu_Latn"), ("en", "eng")):
        assert read(long_tokens / f"train.{other}") == read(short_tokens / f"train.{one}")
    assert prep["languages"] == {"deu_Latn": "de", "eng": "en"}
    of_test = evaluate.references(long / "raw/test.eng", Preparation.at(long))[1]
    assert of_test == read(short_tokens / "test.en")
    assert [*map(Text(long).subwords, AWKWARD)] == read(tmp_path / "short/out.work/2-subwords/test.de")


def test_spaces_of_any_kind_are_spaces():
    """fairseq splits at them: an ideographic space inside a subword would tear it apart."""
    assert words("none", "ja").tokenize(" 今日は\u3000寒い\u00a0ですね\n") == "今日は 寒い ですね"


DECOMPOSED = unicodedata.normalize("NFD", "Können Löwen über Zäune springen?")


def test_decomposed_text_is_composed_at_every_door(tmp_path):
    lines = ["Der Löwe springt über den Zaun.", DECOMPOSED, "Können wir gehen?"] * 2
    data, prep = alike(tmp_path, "de", "en", lines, merges=30)
    assert prep["unicode"] == "NFC"
    assert prep["rules"]["nfc"] is True
    assert prep["round_trip"]["de"]["decomposed"] == 2, "what there was is recorded"
    for split in ("train", "valid", "test"):
        prepared_text = (tmp_path / f"out.work/2-subwords/{split}.de").read_text()
        assert "\u0308" not in prepared_text, "an umlaut's dots on their own"
    source = Text(data).subwords
    assert source(DECOMPOSED) == source(unicodedata.normalize("NFC", DECOMPOSED))
    assert unicodedata.is_normalized("NFC", source(DECOMPOSED))
    references, tokens = evaluate.references(data / "raw/test.en", Preparation.at(data))
    assert all(unicodedata.is_normalized("NFC", line) for line in references + tokens)
    assert read(data / "raw/test.en")[1] == DECOMPOSED, "raw text stays as it was given"
    old = {key: value for key, value in prep.items() if key not in ("unicode", "round_trip", "escape")} | {"rules": {}}
    (data / "PREP.json").write_text(json.dumps(old))  # as an earlier version wrote it
    assert Preparation.at(data).escape
    assert Text(data).subwords(DECOMPOSED) == source(DECOMPOSED)


def test_published_text_keeps_its_bytes(tmp_path):
    """Without nfc, as in every public corpus, only typed text is composed, and that where the corpus is."""
    lines = ["Der Löwe springt über den Zaun.", "Können wir gehen?"] * 60
    data, prep = alike(tmp_path / "one", "de", "en", [*lines, DECOMPOSED], merges=30, nfc=False)
    assert "\u0308" in (tmp_path / "one/out.work/2-subwords/train.de").read_text(), "an umlaut's dots on their own"
    assert prep["unicode"] == "NFC"
    source = Text(data).subwords
    assert source(DECOMPOSED) == source(unicodedata.normalize("NFC", DECOMPOSED))
    assert evaluate.references(data / "raw/test.en", Preparation.at(data))[0][-1] == DECOMPOSED

    data, prep = alike(tmp_path / "other", "de", "en", [lines[0], DECOMPOSED], merges=30, nfc=False)
    assert prep["unicode"] == "as given"
    assert any("NFC" in warning for warning in report.warnings(prep))
    source = Text(data).subwords
    assert source(DECOMPOSED) != source(unicodedata.normalize("NFC", DECOMPOSED))
