"""scripts/plot_attention.sh: pictures whose labels fit, a page that works in a browser, numbers that add up."""

import dataclasses
import io
import json
import logging
import re
import xml.etree.ElementTree as xml
from dataclasses import replace

import numpy
import pytest
from helpers import browser
from helpers.maps import inputs, maps_of
from helpers.mistakes import check_refusal, mistakes
from helpers.models import amplify_, build
from matplotlib import font_manager
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from ea_artifacts.command import UserError
from ea_tools.figures.labels import families
from ea_tools.maps import draw, picture
from ea_tools.maps.draw import chosen, main, parse
from ea_tools.maps.exports import numbers, page
from ea_tools.maps.look import AXES, PARTS, Look, Row, of_words, one_head, parts_of
from ea_tools.maps.models import load_model
from ea_tools.maps.words import merged, starts, words_of

logging.getLogger("matplotlib").setLevel(logging.WARNING)  # as the command does

EIGHT_HEADS = (
    "--encoder-embed-dim 64 --encoder-ffn-embed-dim 64 --encoder-attention-heads 8 --encoder-layers 6 "
    "--decoder-attention-heads 8 --decoder-layers 6 --dropout 0"
).split()
WORDS = "ein kleines Mädchen klettert Donaudampfschiff@@ fahrt in , das Holz@@ haus .".split()


def look(source=6, target=5, words=WORDS, size=EIGHT_HEADS, compare=True, arch="ea_transformer_base", flags=()):
    """Maps of models with random weights, and labels that are not theirs."""

    def places(arch, *flags):
        maps = maps_of(amplify_(build(arch, *flags, size=size)), *inputs([source], [target]))
        return {(one.kind, one.layer): one for one in maps}

    def labels(length):
        return [words[i % len(words)] for i in range(length - 1)] + ["</s>"]

    def in_words(side):
        return words_of(side, [True] * len(side), starts(side, "subword_nmt"), "subword_nmt")

    tokens = {"source": labels(source), "predicted": labels(target), "read": ["</s>", *labels(target)[:-1]]}
    words_of_them = {name: in_words(side) for name, side in tokens.items()}
    baseline, name = (places("transformer"), "base/last.pt") if compare else ({}, None)
    return Look(tokens, words_of_them, places(arch, *flags), baseline, "run/last.pt", name)


PARTS4 = ["map", "own", "convolution", "baseline"]
ROWS = [Row("encoder", 3, 1), Row("decoder", 3, "mean"), Row("cross", 6, 8)]


def test_characters_that_no_font_has_are_named(monkeypatch):
    manager = font_manager.fontManager
    fonts = [font for font in manager.ttflist if font.name.startswith(("DejaVu Sans", "Last Resort"))]
    fonts.append(font_manager.FontEntry(fname="/gone.ttf", name="Gone Sans", weight=400))  # since the list was made
    monkeypatch.setattr(manager, "ttflist", fonts)
    monkeypatch.setattr(font_manager, "findSystemFonts", list)
    assert families("a שلहि") == (("DejaVu Sans",), {"ह", "ि"})


@pytest.mark.parametrize("length, rows", [(2, ROWS), (20, ROWS), (400, ROWS[2:])])
def test_labels_fit(length, rows, capsys):
    """No label covers another of its axis, or a title, or leaves the picture, which is not too large to be drawn."""
    there = look(length, max(2, length - 3))
    sizes = picture.sizes_of(there)
    figure = picture.figure(there, rows, PARTS4, sizes)
    figure.draw_without_rendering()
    panels = [axes for axes in figure.axes if axes.images]
    assert len(panels) == 4 * len(rows)
    for axes in panels:
        across, down = (_boxes(label for label in side if label.get_text()) for side in _labels(axes))
        height, width = axes.images[0].get_array().shape
        assert len(across) == -(-width // sizes.every) and _apart(across)
        assert not down or (len(down) == -(-height // sizes.every) and _apart(down))
    labels = {label for axes in panels for side in _labels(axes) for label in side}
    bars = {label for axes in panels for bar in axes.child_axes for label in bar.get_yticklabels()}
    texts = {text for text in figure.findobj(Text) if text.get_text().strip() and text.get_visible()}
    others = [box for box in _boxes(texts - labels - bars) if box.width > 1]  # an invisible axis has texts, too
    assert len(others) >= len(rows) * (1 + 2 * 4 + 1)  # of a row and its panels, which have names below them
    assert _apart(others)
    labels = _boxes(label for label in labels if label.get_text())
    assert not any(one.overlaps(label) for one in others for label in labels)
    page = figure.bbox
    for box in others + labels + _boxes(text for text in bars if text.get_visible()):
        assert page.x0 <= box.x0 and box.x1 <= page.x1
        assert page.y0 <= box.y0 and box.y1 <= page.y1
    assert sizes.font >= 6
    assert sizes.every == {400: 5}.get(length, 1)
    assert ("an .html page has all of them" in capsys.readouterr().err) == (length > 60)
    assert figure.get_size_inches().max() * picture.DOTS < 2**14


def _labels(axes):
    return axes.get_xticklabels(), axes.get_yticklabels()


def _boxes(texts):
    """Their places, without the empty line below the heading of a row."""
    boxes = [(text.get_window_extent(), text.get_text().endswith("\n")) for text in texts]
    return [Bbox([[box.x0, (box.y0 + box.y1) / 2 + 1 if half else box.y0], [box.x1, box.y1]]) for box, half in boxes]


def _apart(boxes):
    return not any(one.overlaps(other) for index, one in enumerate(boxes) for other in boxes[:index])


def test_one_colour_scale_per_row_and_the_right_maps():
    there = look()
    figure = picture.figure(there, ROWS, PARTS4, picture.sizes_of(there))
    images = [axes.images[0] for axes in figure.axes if axes.images]
    for row, shown in zip(ROWS, (images[:4], images[4:8], images[8:]), strict=True):
        maps, baseline = there.maps[row.kind, row.layer], there.baseline[row.kind, row.layer]
        expected = [maps.weights, maps.alone("logits"), maps.alone("convolution"), baseline.weights]
        for image, values in zip(shown, expected, strict=True):
            values = values[0].mean(0) if row.head == "mean" else values[0, row.head - 1]
            seen = ~maps.masked[0, 0].numpy()
            drawn = image.get_array()
            numpy.testing.assert_allclose(drawn[seen], values.numpy()[seen], atol=1e-7)
            assert numpy.ma.getmaskarray(drawn).tolist() == (~seen).tolist()
        assert len({image.get_clim() for image in shown}) == 1
        assert shown[0].get_clim() == (0, max(image.get_array().max() for image in shown))


def test_pictures_are_the_same_again_also_of_a_kind_without_a_part():
    there = look(flags=("--ea-cross-beta", "0"), compare=False)
    assert there.parts == ["map", "own", "convolution"]
    assert look(arch="transformer", compare=False).parts == ["map"]
    rows = [Row("cross", 3, 1)]
    first = picture.picture(there, rows, there.parts, "svg")
    assert picture.picture(there, rows, there.parts, "svg") == first
    assert xml.fromstring(first).tag == "{http://www.w3.org/2000/svg}svg"
    assert picture.picture(there, rows, ["map"], "png").startswith(b"\x89PNG")


def test_numbers_add_up_also_of_words_and_rollout():
    there = replace(look(9, 9), in_words=True)
    arrays = numpy.load(io.BytesIO(numbers(there)))
    assert arrays["tokens.source"].tolist() == there.tokens["source"]
    for kind, layer in there.maps:
        place = f"{kind}.{layer}"
        parts = ("logits", "convolution", *(["previous"] if kind == "encoder" and layer > 1 else []))
        mixed = sum(arrays[f"{place}.{part}.share"] * arrays[f"{place}.{part}"] for part in parts)
        mixed = numpy.exp(numpy.where(arrays[f"{place}.masked"], -numpy.inf, mixed))
        mixed /= mixed.sum(-1, keepdims=True)
        numpy.testing.assert_allclose(mixed, arrays[f"{place}.weights"], atol=1e-6, rtol=0)

    joined = "ein kleines Mädchen klettert Donaudampfschifffahrt in , </s>"
    assert arrays["words.source"].tolist() == joined.split()
    assert arrays["words.source.of_token"].tolist() == [0, 1, 2, 3, 4, 4, 5, 6, 7]
    sides = (arrays[f"words.{side}.of_token"] for side in ("predicted", "source"))
    expected = merged(arrays["baseline.cross.6.weights"], *sides)
    numpy.testing.assert_allclose(arrays["baseline.cross.6.word_weights"], expected, atol=1e-6)
    product = numpy.eye(9)
    for layer in range(1, 7):
        product = (0.5 * arrays[f"encoder.{layer}.weights"].mean(0) + 0.5 * numpy.eye(9)) @ product
    numpy.testing.assert_allclose(arrays["encoder.6.rollout"], product, atol=1e-6)
    assert "baseline.encoder.6.rollout" in arrays and "decoder.6.rollout" not in arrays


@pytest.mark.slow
def test_the_command_draws_what_it_is_asked_for(checkpoints, tmp_path, capsys):
    files = [tmp_path / "new" / f"a{suffix}" for suffix in draw.SUFFIXES]
    words = ["--checkpoint", checkpoints.evolving, "--compare", checkpoints.stock, "--source", "Hund, Katze."]
    words += ["--target", "the dog, the cat.", "--layer", 1, "--head", "mean", "--words"]
    main([*map(str, [*words, "--out", *files, files[0]])])  # one of them twice
    assert sorted(file.name for file in (tmp_path / "new").iterdir()) == sorted(file.name for file in files)
    assert all(file.stat().st_size > 1000 for file in files)
    assert "source: h" in capsys.readouterr().err
    arrays = numpy.load(files[3])
    assert arrays["words.source"].tolist() == ["hund", ",", "katze", ".", "</s>"]
    assert arrays["cross.1.weights"].shape[0] == 2
    assert '"start": {"kind": "encoder", "layer": 1, "head": 0, "words": true}' in files[2].read_text()


@mistakes("""
    {evolving} --kind encoder --layer 3 | '--layer 3: ' evolving.pt '2 layers with encoder self'
    {evolving} --head 3 | '--head 3: ' evolving.pt '2 heads'
    {mixed} --kind cross --part convolution | '--part convolution: ' encoder-decoder --kind
    {evolving} --kind decoder --part rollout | '--part rollout: ' '--kind encoder'
    {evolving} --source '  ' | 'the source sentence is empty'
    {evolving} --source '\udcfcber' | 'UTF-8: ?ber'
    {evolving} --source 'Hund. Hund. Hund. Hund. Hund. Hund.' | 'the source sentence' evolving.pt 'takes 11'
    {evolving} --compare none.pt | 'none.pt: no such file'
""")
def test_mistakes_leave_nothing_behind(checkpoints, tmp_path, capsys, words, named):
    words = ["--checkpoint", words[0], "--source", "Hund, Katze.", "--out", tmp_path / "new/a.png", *words[1:]]
    check_refusal(capsys, main, words, named, writes_to=tmp_path, **vars(checkpoints))


def test_a_baseline_with_fewer_heads_is_named():
    there = look()
    fewer = look(size=["--encoder-attention-heads", "2", "--decoder-attention-heads", "2", *EIGHT_HEADS[:4]])
    mixed = Look(there.tokens, there.words, there.maps, fewer.maps, "run/last.pt", "base/last.pt")
    args = parse(["--run", "x", "--source", "y", "--head", "8", "--layer", "6"])
    with pytest.raises(UserError, match=r"--head 8: --compare base/last\.pt has 2 heads"):
        chosen(mixed, args)


def test_a_language_without_spaces_keeps_its_subwords(checkpoints):
    """Nothing says which of its subwords make a word, unless the text came in tokens."""
    loaded = load_model(checkpoints.evolving)
    assert loaded.source("Hund 猫").labels[-2:] == ["⟨猫⟩", "</s>"], "a word that the model does not know"
    symbols = ["h@@", "und", "</s>"]
    assert loaded.words(symbols, "source").labels == ["hund", "</s>"]
    loaded.preparation = dataclasses.replace(loaded.preparation, tokenizer="none", source_lang="th")
    assert loaded.words(symbols, "source").labels == ["h", "und", "</s>"]
    assert not loaded.has_words("source")
    loaded.preparation = dataclasses.replace(loaded.preparation, tokenizer="given", source_lang="zh")
    assert loaded.words(symbols, "source").labels == ["hund", "</s>"]


def test_the_page_is_small_needs_no_network_and_tokens_cannot_end_its_script():
    there = look(40, 40, words=["</script><script>alert(1)</script>", "<!--"])
    text = page(there, Row("encoder", 3, 1))
    assert page(there, Row("encoder", 3, 1)) == text
    assert len(text.encode()) < 5e6
    assert not re.search(r"https?://|<link|src=|@import|url\(", text)
    assert "alert(1)</script>" not in text
    inside = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1]
    assert json.loads(inside)["tokens"]["source"][0] == "</script><script>alert(1)</script>"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    if browser.missing():
        pytest.skip(f"needs {browser.missing()}: apt-get install chromium chromium-driver")
    with browser.browser(tmp_path_factory.mktemp("profile"), "--window-size=1400,1000") as running:
        yield running


def value(there, kind, layer, head, part, row, column):
    """The value that the page should show."""
    (name,) = (name for name, title in PARTS.items() if title == part)
    return one_head(parts_of(there, kind, layer)[name], head)[row, column]


def shown(text):
    """{part: number} of the page's text."""
    return {name: float(number) for name, number in re.findall(r"([a-z][a-z '-]+) ([0-9.]+)(?:,|$)", text)}


@pytest.fixture
def opened(chromium, tmp_path):
    """A function that opens the page of a look in the browser, which has nothing to complain about at the end."""

    def open_page(there, row):
        (tmp_path / "a.html").write_text(page(there, row), encoding="utf-8")
        chromium.open(tmp_path / "a.html")

    yield open_page
    assert chromium.complaints() == []


def hover_labelled(page, part, row, column):
    canvas = f'#panels canvas[data-part="{part}"]'
    left, head, cell = page.run(
        "const c = document.querySelector(arguments[0]); return [c.left, c.head, c.cell]", canvas
    )
    page.hover(canvas, left + (column + 0.5) * cell, head + (row + 0.5) * cell)
    return page.text("#readout")


def test_the_page_in_a_browser(chromium, opened):
    """Hover, read the value; switch head and layer, by pointer and by key."""
    there = look(12, 9, words=["ein", "שלום", "كتاب", "猫", "😀", "naïve"])
    opened(there, Row("encoder", 3, 1))
    place = "document.querySelector('#place h2').textContent"

    def check(kind, layer, head, row, column, part="map"):
        text = hover_labelled(chromium, part, row, column)
        found = shown(text.split("\u2069: ")[1])
        rollouts = {"attention rollout", "the baseline's rollout"} if kind == "encoder" else set()
        assert set(found) == {"map in use", "own query-key logits", "convolution", "baseline"} | rollouts
        for name, number in found.items():
            assert number == pytest.approx(value(there, kind, layer, head, name, row, column), abs=1e-4)
        rows, columns = AXES[kind][:2]
        assert f"⁨{there.tokens[rows][row]}⁩ → ⁨{there.tokens[columns][column]}⁩" in text

    assert chromium.run(f"return {place}") == "encoder self-attention, layer 3, head 1"
    check("encoder", 3, 1, 1, 2)
    chromium.click("#head-5")
    check("encoder", 3, 5, 1, 2)
    chromium.click('#overview canvas[data-kind="cross"][data-layer="6"]')
    assert chromium.run(f"return {place}") == "encoder-decoder attention, layer 6, head 5"
    check("cross", 6, 5, 8, 11, part="baseline")
    for key in ("ArrowLeft", "h"):
        chromium.press(key)
    check("cross", 5, 6, 0, 0, part="convolution")
    for key in ("0", "ArrowUp"):
        chromium.press(key)
    assert chromium.run(f"return {place}") == "decoder self-attention, layer 5, mean over heads"
    check("decoder", 5, "mean", 8, 3)
    assert "map in use –" in hover_labelled(chromium, "map", 2, 5)  # the future

    chromium.press("2")
    assert chromium.run("return document.getElementById('units').hidden")  # each of these subwords is a word
    chromium.click("#part-convolution")
    box = "const b = document.querySelector(arguments[0]).getBoundingClientRect(); return [b.width, b.height]"
    canvas = '#overview canvas[data-kind="encoder"][data-layer="4"]'
    width, height = chromium.run(box, canvas)
    chromium.hover(canvas, width * 7.5 / 12, height * 2.5 / 12)
    found = shown(chromium.text("#readout").split("\u2069: ")[1])
    assert found == {"convolution": pytest.approx(value(there, "encoder", 4, 2, "convolution", 2, 7), abs=1e-4)}


def test_words_in_a_browser(chromium, opened):
    """By button and by key; the merged maps are those of the picture."""
    there = look(9, 9)
    opened(there, Row("cross", 6, 3))
    before = shown(hover_labelled(chromium, "map", 4, 5).split("\u2069: ")[1])["map in use"]
    assert before == pytest.approx(there.maps["cross", 6].weights[0, 2, 4, 5].item(), abs=1e-4)
    chromium.press("w")
    values = parts_of(there, "cross", 6)
    expected = {part: of_words(there, "cross", all_heads)[2, 4, 5] for part, all_heads in values.items()}
    text = hover_labelled(chromium, "map", 4, 5)
    assert "⁨Donaudampfschifffahrt⁩ → ⁨in⁩" in text
    found = shown(text.split("\u2069: ")[1])
    assert found == {PARTS[part]: pytest.approx(value, abs=1e-4) for part, value in expected.items()}
    assert "query: word to predict" in chromium.text("#most")
    chromium.press("ArrowUp")  # decoder self-attention, where the future stays hidden
    decoder = of_words(there, "decoder", parts_of(there, "decoder", 6)["map"])
    assert numpy.isnan(decoder[2, 1, 2])
    assert "map in use –" in hover_labelled(chromium, "map", 1, 2)
    chromium.click("#tokens")
    assert "query: token to predict" in chromium.text("#most")


def test_a_baseline_alone_in_a_browser(chromium, opened):
    """A model without convolutions, whose decoder has fewer layers: fewer buttons, no errors."""
    small = [*EIGHT_HEADS[:-4], "--decoder-layers", "2", "--dropout", "0"]
    opened(look(arch="transformer", compare=False, size=small), Row("encoder", 6, "mean"))
    buttons = "return [...document.querySelectorAll('#parts button')].map(b => b.textContent)"
    assert chromium.run(buttons) == ["map in use", "attention rollout"]
    chromium.press("ArrowDown")  # to the decoder, which has no layer 6
    assert chromium.text("#place h2") == "decoder self-attention, layer 2, mean over heads"


def words_in(bpe, symbols, unknown=()):
    return words_of(symbols, [symbol not in unknown for symbol in symbols], starts(symbols, bpe), bpe)


def test_words_of_marked_subwords():
    found = words_in("subword_nmt", "ein Donau@@ dampf@@ schiff . </s>".split())
    assert found.numbers.tolist() == [0, 1, 1, 1, 2, 3]
    assert found.labels == ["ein", "Donaudampfschiff", ".", "</s>"]
    read = found.read("</s>")
    assert read.numbers.tolist() == [0, 1, 2, 2, 2, 3]
    assert read.labels == ["</s>", "ein", "Donaudampfschiff", "."]


def test_words_of_pieces():
    found = words_in("sentencepiece", "▁ein ▁Donau dampf ▁ .".split(), unknown=["dampf"])
    assert found.numbers.tolist() == [0, 1, 1, 2, 2]
    assert found.labels == ["ein", "⟨Donaudampf⟩", "."]
    assert words_in("sentencepiece", ["▁"]).labels == ["▁"]
    assert words_in("sentencepiece", []).labels == []


def test_merging_by_loops():
    rng = numpy.random.default_rng(0)
    maps = rng.random((2, 5, 4))
    maps[:, 0, 2:] = numpy.nan  # a row that sees less
    maps[:, :, 3] = numpy.nan  # a column that no row sees
    rows, columns = numpy.array([0, 0, 1, 2, 2]), numpy.array([0, 1, 1, 2])
    found = merged(maps, rows, columns)
    assert found.shape == (2, 3, 3)
    for head, row, column in numpy.ndindex(found.shape):
        of_rows = [
            sum(maps[head, r, c] for c in range(4) if columns[c] == column and not numpy.isnan(maps[head, r, c]))
            for r in range(5)
            if rows[r] == row
        ]
        if column == 2:
            assert numpy.isnan(found[head, row, column])
        else:
            assert found[head, row, column] == pytest.approx(sum(of_rows) / len(of_rows))
