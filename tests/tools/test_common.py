"""Files are replaced when they are complete, and mistakes are one line."""

import errno
import os
import shlex
import shutil
import signal
import subprocess
import sys
import warnings

import pytest
from helpers.toy import made_checkpoint

from ea_artifacts.command import UserError, ignore_warnings, reporting, say
from ea_artifacts.files import read_json, read_lines, replacing, write_json
from ea_artifacts.run import Run


def write(path, text):
    with replacing(path) as temporary:
        temporary.write_text(text)


def test_a_link_stays_and_what_it_leads_to_is_replaced(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there/file")
    for text in ("first", "second"):
        write(tmp_path / "link", text)
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "there/file").read_text() == text
    assert [path.name for path in tmp_path.rglob(".*")] == []
    with pytest.raises(UserError, match="there: "):
        write(tmp_path / "there", "text")


def test_processes_that_write_one_file_have_temporary_files_of_their_own(tmp_path, monkeypatch):
    """Else one would rename the unfinished file of the other."""
    with replacing(tmp_path / "file") as mine:
        mine.write_text("mine")
        monkeypatch.setattr(os, "getpid", lambda: 1)
        write(tmp_path / "file", "the other's")
        assert mine.read_text() == "mine"
    assert (tmp_path / "file").read_text() == "mine"


def test_a_pipe_stays_and_is_written_to(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with subprocess.Popen(["cat", tmp_path / "pipe"], stdout=subprocess.PIPE) as reader:
        write(tmp_path / "pipe", "through")
        assert reader.stdout.read() == b"through"
    assert (tmp_path / "pipe").is_fifo()
    code = "from ea_artifacts.files import replacing\nwith replacing('/dev/stdout') as path: path.write_text('out')"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "out", "")


def test_a_reader_that_closes_the_output_ends_the_command_without_a_message():
    """As in scripts/translate.sh ... | head -2."""
    code = "from ea_artifacts.command import reporting\nwith reporting('tool'):\n"
    code += "    while True: print('line', flush=True)"
    pipeline = f"{shlex.quote(sys.executable)} -c {shlex.quote(code)} | head -2; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", pipeline], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("line\nline\n141\n", "")


def test_sigterm_leaves_no_temporary_file(tmp_path):
    code = "import sys, time\nfrom ea_artifacts.command import reporting\n"
    code += "from ea_artifacts.files import replacing\nwith reporting('tool'):\n"
    code += "    with replacing(sys.argv[1]) as path:\n        path.touch(), print(flush=True), time.sleep(99)"
    with subprocess.Popen([sys.executable, "-c", code, tmp_path / "file"], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        process.terminate()
        assert process.wait() == 128 + signal.SIGTERM
    assert not list(tmp_path.iterdir())


def test_a_refusal_of_the_system_is_one_line(tmp_path):
    with pytest.raises(SystemExit) as end, reporting("tool"):
        (tmp_path / "absent").read_text()
    assert end.value.code == f"tool: {tmp_path / 'absent'}: No such file or directory; check the path"


def test_warnings_that_users_cannot_change_are_hidden():
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        ignore_warnings()
        warnings.warn("`isinstance(treespec, LeafSpec)` is deprecated", FutureWarning, stacklevel=1)
        warnings.warn_explicit("old", FutureWarning, "file.py", 1, module="fairseq.tasks")
        warnings.warn("'pin_memory' argument is set as true but no accelerator is found", UserWarning, stacklevel=1)
    assert not seen


def test_json_is_whole_or_not_there(tmp_path):
    path, content = tmp_path / "a.json", {"word": "é", "name": "a\udcff", "seconds": [[0.5] * 100] * 2}
    write_json(path, {"path": tmp_path, **content})
    before = path.read_bytes()
    assert read_json(path) == {"path": str(tmp_path), **content}
    assert before.count(b"\n") == 9, "an item of a list is one line, however long"
    with pytest.raises(TypeError):
        write_json(path, {"word": {1, 2}})
    assert path.read_bytes() == before
    path.write_bytes(b'{"a": ')
    with pytest.raises(UserError, match=r"a\.json: not JSON: "):
        read_json(path)
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_lines_end_only_at_line_feeds_and_are_utf8(tmp_path):
    path = tmp_path / "text"
    path.write_bytes("\ufeffone\u2028still one\r\n\n\ufeffthree\x85\na\rb\n".encode())
    lines = ["one\u2028still one", "", "\ufeffthree\x85", "a b"]
    assert read_lines(path) == lines, "a mark at the beginning is no text, a carriage return inside is no end"
    for content, named in (
        (b"good\nb\xffd\n", "text:2: not UTF-8: .* at byte 2"),
        ("Hallo Welt\n".encode("utf-16"), "text:1: not UTF-8 but UTF-16"),
        (b"good\n\xff\xfe torn\n", "text:2: not UTF-8: "),
        ("Hund\nKatze\n".encode("UTF-16LE"), "text:1: a NUL byte"),  # each line would count as two
    ):
        path.write_bytes(content)
        with pytest.raises(UserError, match=named):
            read_lines(path)


def test_a_terminal_that_lacks_a_letter_ends_nothing():
    program = (
        "from ea_artifacts.command import reporting\n"
        "with reporting('tool'):\n    print('39.95 ± 0.59')\n    print('done')"
    )
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "39.95 ? 0.59\ndone\n"


def test_without_a_record_a_runs_model_is_the_average_of_the_most_updates(tmp_path):
    """Then the best, then the last; whatever the times of the files are."""
    with pytest.raises(UserError, match=str(tmp_path)):
        Run(tmp_path).model()
    updates = {"average3.pt": 200, "average10.pt": 100, "average9.pt": 100, "checkpoint_best.pt": 300}
    for when, (name, number) in enumerate((updates | {"checkpoint_last.pt": 200}).items(), 1):
        made_checkpoint(tmp_path / name, number)
        os.utime(tmp_path / name, (1000 * when, 1000 * when))
    for name in (*updates, "checkpoint_last.pt"):
        assert Run(tmp_path).model().name == name
        (tmp_path / name).unlink()


def test_the_record_says_which_checkpoint_is_the_model(tmp_path, capsys):
    for name in ("average2.pt", "average3.pt", "checkpoint_last.pt"):
        made_checkpoint(tmp_path / name, 100)
    Run(tmp_path).record_model("average2.pt")
    copy = shutil.copytree(tmp_path, tmp_path.with_name(tmp_path.name + "-copy"))
    for folder in (tmp_path, copy):
        assert Run(folder).choose(say) == folder / "average2.pt"
        assert f"the model of {folder} is average2.pt" in capsys.readouterr().err
    (copy / "average2.pt").unlink()
    with pytest.raises(UserError, match=r"model\.json .*average2\.pt"):
        Run(copy).model()
    for content in ("{", "[]", '{"checkpoint": null}'):
        (copy / "model.json").write_text(content)
        with pytest.raises(UserError, match=r"model\.json "):
            Run(copy).model()


def test_an_average_from_before_the_training_went_on_is_noted(tmp_path, capsys):
    made_checkpoint(tmp_path / "average3.pt", 100)
    for updates, noted in ((100, False), (150, True)):
        made_checkpoint(tmp_path / "checkpoint_last.pt", updates)
        assert Run(tmp_path).choose(say) == tmp_path / "average3.pt"
        assert ("was made after 100 updates, and the training went on to 150" in capsys.readouterr().err) == noted


def test_too_many_open_files_have_advice():
    with pytest.raises(SystemExit, match=r"tool: a: Too many open files; .*ulimit -n"), reporting("tool"):
        raise OSError(errno.EMFILE, "Too many open files", "a")
