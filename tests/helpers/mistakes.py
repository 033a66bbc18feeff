"""A command that refuses its arguments says why, ends with a status, and writes nothing; a stand-in for a command."""

import os
import shlex

import pytest


def refusal(capsys, main, *arguments, writes_to=None):
    """The message of a command's main(), which must refuse these arguments and leave a folder as it is."""
    before = _contents(writes_to)
    with pytest.raises(SystemExit) as end:
        main([*map(str, arguments)])
    assert end.value.code not in (0, None)
    assert _contents(writes_to) == before
    return f"{end.value.code} {capsys.readouterr().err}"


def _contents(folder):
    paths = folder.rglob("*") if folder else ()
    return {path: path.read_bytes() if path.is_file() else path.is_symlink() for path in paths}


def mistakes(table):
    """A test of each line of a table, as `words` and `named`: the words of a command | what its message has to name."""
    lines = [line.strip() for line in table.strip().splitlines()]
    rows = [[shlex.split(half) for half in line.split(" | ")] for line in lines]
    return pytest.mark.parametrize(("words", "named"), rows, ids=[line.partition(" | ")[0] for line in lines])


def check_refusal(capsys, main, words, named, **places):
    """The command refuses these words, in which {name} is a place, and its message names all that it has to."""
    words, named = ([_filled(word, places) for word in side] for side in (words, named))
    said = refusal(capsys, main, *words, writes_to=places.get("writes_to"))
    assert not [word for word in named if word not in said], said
    assert "Traceback" not in said and "usage:" not in said


def _filled(word, places):
    for name, place in places.items():
        word = str(word).replace(f"{{{name}}}", str(place))
    return str(word)


def fake_command(folder, name, program, monkeypatch):
    """Put a program of the shell on the PATH, in the place of a command that is not here."""
    path = folder / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{program}")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}{os.pathsep}{os.environ['PATH']}")
