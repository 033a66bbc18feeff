"""A command that refuses its arguments: it says why, ends with a status, and writes nothing."""

import pytest


def refusal(capsys, main, *arguments, writes_to=None):
    """The message of a command's main(), which must refuse these arguments and leave a folder as it is."""
    before = sorted(writes_to.rglob("*")) if writes_to else []
    with pytest.raises(SystemExit) as end:
        main([*map(str, arguments)])
    assert end.value.code not in (0, None)
    assert not writes_to or sorted(writes_to.rglob("*")) == before
    return f"{end.value.code} {capsys.readouterr().err}"
