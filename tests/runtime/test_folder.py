"""The model in the box is whole, small, and translates; the runtime's options, tried with it.

Whatever is wrong with an export's folder is one error, which names the file; no file of another export is used.
"""

import json
import os
import shutil
from pathlib import Path

import pytest
from helpers import PRETRAINED
from helpers.toy import runtime

import evolving_attention
from ea_artifacts.files import sha256
from ea_artifacts.preparation import Preparation
from ea_runtime import ExportError, Translator
from ea_runtime.folder import Export


def test_it_translates_captions_and_is_small():
    captions = ["Zwei junge Männer sind im Freien.", "", "Ein Hund rennt über die Wiese."]
    translations = Translator(PRETRAINED, threads=1).translate(captions)
    assert translations == ["two young men are outside.", "", "a dog runs through the grass."]
    assert sum(path.stat().st_size for path in PRETRAINED.iterdir()) < 6e6


@pytest.mark.parametrize("threads", [0, 257])
def test_numbers_of_threads_that_are_none_are_refused(threads):
    with pytest.raises(ValueError, match="threads"):
        Translator(PRETRAINED, threads=threads)


@pytest.mark.parametrize(("policy", "spins"), [("", "0"), ("passive", "0"), ("active", "1")])
def test_threads_wait_without_spinning_unless_asked_to(policy, spins, monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    translator = Translator(PRETRAINED, threads=2)
    for session in (translator._encoder, translator._decoder):
        options = session.get_session_options()
        assert options.get_session_config_entry("session.intra_op.allow_spinning") == spins
        assert options.intra_op_num_threads == 2


def test_the_version_is_the_projects():
    assert runtime("--version").stdout == f"ea_runtime {evolving_attention.__version__}\n"


def edit(place, **entries):
    path = place / "model.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


def replace(place, name, content):
    """Another file in the place of one, and listed as it is."""
    (place / name).write_bytes(content if isinstance(content, bytes) else content((place / name).read_bytes()))
    edit(place, digests={**Export(place).digests, name: sha256(place / name)})


def prep(place, **entries):
    """Other entries of PREP.json; None takes one out."""

    def edited(content):
        whole = {**json.loads(content), **entries}
        return json.dumps({name: value for name, value in whole.items() if value is not None}).encode()

    replace(place, "PREP.json", edited)


def unlist(place, name):
    edit(place, digests={file: value for file, value in Export(place).digests.items() if file != name})


FAULTS = {
    "no export": (lambda place: (place / "model.json").unlink(), ["model.json", "export.sh"]),
    "torn": (lambda place: (place / "decoder.onnx").write_bytes(b"torn"), ["decoder.onnx", "damaged"]),
    "missing": (lambda place: (place / "encoder.onnx").unlink(), ["encoder.onnx", "no such file"]),
    "a folder": (lambda place: (place / "code").unlink() or (place / "code").mkdir(), ["code", "damaged"]),
    "no JSON": (lambda place: (place / "model.json").write_text("{"), ["model.json", "damaged"]),
    "newer": (lambda place: edit(place, format=2, digests=None), ["format 2", "update"]),
    **{
        f"format {value}": (lambda place, value=value: edit(place, format=value), ["model.json", "format", repr(value)])
        for value in ("1", True, 0, -1)
    },
    "deep": (lambda place: (place / "model.json").write_text("[" * 200_000), ["model.json", "damaged"]),
    "deep PREP.json": (lambda place: replace(place, "PREP.json", b"[" * 200_000), ["PREP.json", "damaged"]),
    "wide": (lambda place: edit(place, search={"beam": 100_000}), ["model.json", "beam"]),
    "task": (lambda place: edit(place, task="denoising"), ["model.json", "denoising"]),
    "other task": (lambda place: edit(place, task="language_modeling"), ["Translator", "language_modeling"]),
    "empty dictionaries": (lambda place: edit(place, dictionaries={}), ["model.json", "dictionaries"]),
    "dictionary": (lambda place: edit(place, dictionaries={"source": 3, "target": "code"}), ["model.json", "3"]),
    "search": (lambda place: edit(place, search={"bean": 5}), ["model.json", "bean"]),
    "no positions": (lambda place: edit(place, max_positions=[]), ["model.json", "max_positions"]),
    "few positions": (lambda place: edit(place, max_positions=[1, 1024]), ["model.json", "max_positions"]),
    "digests": (lambda place: edit(place, digests=[]), ["model.json", "digests"]),
    "outside": (lambda place: edit(place, digests={"../code": "0"}), ["model.json", "digests", "../code"]),
    "no digests": (lambda place: edit(place, digests={}), ["PREP.json", "list"]),
    **{
        f"{name} not listed": (lambda place, name=name: unlist(place, name), [f"/{name}", "list"])
        for name in ("decoder.onnx", "code", "dict.en.txt", "PREP.json")
    },
    **{
        f"{name} of another export": (lambda place, name=name: (place / name).write_text("a\n"), [f"/{name}", "list"])
        for name in ("vocabulary.de", "vocabulary.en", "sentencepiece.bpe.model")
    },
    "codes": (lambda place: replace(place, "code", b"#version: 0.2\na b c\n"), ["code", "a b c"]),
    "PREP.json": (lambda place: replace(place, "PREP.json", b'{"name": '), ["PREP.json"]),
    **{
        f"no {name}": (lambda place, name=name: prep(place, **{name: None}), ["PREP.json", name])
        for name in ("bpe", "lowercase", "tokenizer", "source_lang", "target_lang")
    },
    "bpe": (lambda place: prep(place, bpe="none"), ["PREP.json", "none"]),
    "rules": (lambda place: prep(place, rules=[1]), ["PREP.json"]),
    "short dictionary": (lambda place: replace(place, "dict.en.txt", lambda old: old.split(b"\n")[0]), ["7880"]),
    "long dictionary": (lambda place: replace(place, "dict.de.txt", lambda old: old + b"more 1\n"), ["7880"]),
    "torn dictionary": (lambda place: replace(place, "dict.de.txt", lambda old: old[:-3]), ["dict.de.txt"]),
    "torn ONNX": (lambda place: replace(place, "decoder.onnx", lambda old: old[:1000]), ["decoder.onnx"]),
    "graphs": (lambda place: replace(place, "encoder.onnx", (place / "decoder.onnx").read_bytes()), ["damaged"]),
}


@pytest.mark.parametrize("fault, says", FAULTS.values(), ids=list(FAULTS))
def test_a_faulty_folder_is_named(tmp_path, fault, says, capfd):
    place = shutil.copytree(PRETRAINED, tmp_path / "broken")
    fault(place)
    with pytest.raises(ExportError) as error:
        Translator(place, threads=1)
    assert all(word in str(error.value) for word in says), error.value
    assert "\n" not in str(error.value) and capfd.readouterr() == ("", "")


def test_other_files_may_lie_in_the_folder(tmp_path):
    place = shutil.copytree(PRETRAINED, tmp_path / "exported")
    (place / "README.md").write_text("about this model")
    (place / "eval").mkdir()
    assert Translator(place, threads=1).translate("Ein Hund.") == Translator(PRETRAINED, threads=1).translate(
        "Ein Hund."
    )


def test_a_faulty_folder_ends_the_command_with_one_line(tmp_path):
    place = tmp_path / os.fsdecode(b"no-utf-8-\xff")
    shutil.copytree(PRETRAINED, place)
    done = runtime(place)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "no-utf-8-" in done.stderr and "Traceback" not in done.stderr


def test_the_digest_of_a_runs_text_stays_what_it_was(tmp_path):
    """Another one would refuse all runs that are there already."""
    for name, content in {
        "PREP.json": '{"source_lang": "de", "target_lang": "en", "tokenizer": "moses", "lowercase": true, '
        '"bpe": "subword_nmt"}',
        "dict.de.txt": "Haus 2\n",
        "dict.en.txt": "house 2\n",
        "vocabulary.de": "Haus\n",
        "code": "#version: 0.2\nH a\n",
        "README": "is no part of it",
    }.items():
        Path(tmp_path / name).write_text(content)
    assert Preparation.at(tmp_path).digest() == "3fe02929be843df7"
