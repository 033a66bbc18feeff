"""Text is read as it is: lines end at \\n and nowhere else, bytes are UTF-8 or refused by file and line."""

import pytest
from helpers.data_toy import corpus, read, recipe, text_only, write

from ea_artifacts.command import UserError
from ea_data.text import checked_lines

ODD = ["\u2028", "\u2029", "\u0085", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e"]  # where str.splitlines breaks lines


def checked(lines, **options):
    return list(checked_lines(lines, "file", **options))


def test_line_ends_and_the_mark_at_the_beginning_are_normalised():
    lines = [b"\xef\xbb\xbfone\r\n", b"two\n", b"three\rand\r\n", b"last"]
    assert checked(lines) == [b"one\n", b"two\n", b"three and\n", b"last\n"]
    assert checked([b"a\n", b"\xef\xbb\xbfb\n"]) == [b"a\n", b"\xef\xbb\xbfb\n"]


@pytest.mark.parametrize("number", [1, 2000, 4100])
def test_not_utf8_names_file_line_and_byte(number):
    lines = [b"fine\n"] * (number - 1) + [b"Stra\xdfe\n"] + [b"fine\n"] * 10
    with pytest.raises(UserError, match=rf"^file, line {number}: byte 5 \(hex df\) is not UTF-8"):
        checked(lines)


def test_utf16_without_a_mark_is_guessed():
    with pytest.raises(UserError, match=r"line 1: byte 1 \(hex e4\) .*iconv -f UTF-16LE -t UTF-8$"):
        checked([line + b"\n" for line in "ä b\n".encode("UTF-16LE").split(b"\n")])


@pytest.mark.parametrize("encoding", ["UTF-16", "UTF-32"])
def test_utf16_and_utf32_are_named(encoding):
    lines = [line + b"\n" for line in "Hallo\nWelt\n".encode(encoding).split(b"\n")]
    with pytest.raises(
        UserError, match=f"^file: is {encoding}, not UTF-8; convert it first: iconv -f {encoding} -t UTF-8$"
    ):
        checked(lines)


def test_nul_is_refused_or_left_to_a_later_step():
    with pytest.raises(UserError, match="file, line 3: a NUL byte"):
        checked([b"a\n", b"b\n", b"c\0d\n"])
    assert checked([b"c\0d\n"], keep_nul=True) == [b"c\0d\n"]


@pytest.mark.parametrize("odd", ODD[::3], ids=ascii)
def test_only_newlines_end_lines(tmp_path, odd):
    """One such character must not put the two sides out of step."""
    raw = corpus(tmp_path / "raw")
    for split in ("train", "valid", "test"):
        lines = read(raw / f"{split}.de")
        lines[3] = f"eins{odd}zwei"
        write(raw / f"{split}.de", lines)
    pipeline = text_only(recipe(), raw, tmp_path / "out")
    for split, number in (("train", 200), ("valid", 20), ("test", 20)):
        german, english = (read(path) for path in pipeline.text("subwords", split))
        assert len(german) == len(english) == number
        assert german[3].replace("@@ ", "") in ("eins zwei", "einszwei")
    assert read(pipeline.text("subwords", "test", raw=True)[0])[3] == f"eins{odd}zwei"  # references stay as they were
