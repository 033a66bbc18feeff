"""scripts/average_checkpoints.sh: right means, tied tensors, and refusals that name the difference."""

import argparse

import pytest
import torch
from helpers import warm
from helpers.toy import tool

from ea_artifacts.checkpoints import DamagedError, load
from ea_artifacts.command import UserError
from ea_artifacts.run import Run
from ea_tools.training import average as average_checkpoints


def checkpoint(path, value, *, dtype=torch.float32, tensors=None, seed=1, task=None, updates=None, **settings):
    """Write a small checkpoint of the layout that fairseq writes, with tied embeddings and a counter."""
    embedding = torch.full((3, 2), value, dtype=dtype)
    model = {
        "encoder.embed_tokens.weight": embedding,
        "decoder.embed_tokens.weight": embedding,
        "decoder.steps": torch.tensor([int(value)]),
        **(tensors or {}),
    }
    defaults = {"arch": "ea_transformer_lite", "ea_alpha": 0.1, "ea_beta": 0.1, "encoder_attention_heads": 4, "lr": [1]}
    cfg = {"model": argparse.Namespace(**{**defaults, **settings}), "common": {"seed": seed}, "task": task or {}}
    state = {"args": None, "cfg": cfg, "model": model, "extra_state": {}, "last_optimizer_state": {"big": embedding}}
    if updates is not None:
        state["optimizer_history"] = [{"num_updates": 1}, {"num_updates": updates}]
    torch.save(state, path)
    return path


def epochs(folder, count, **options):
    return [checkpoint(folder / f"checkpoint{n}.pt", float(n), **options) for n in range(1, count + 1)]


def test_mean_of_the_last_n(tmp_path):
    epochs(tmp_path, 11)  # checkpoint10 sorts after checkpoint9 by number, not by name
    average_checkpoints.main(
        ["--inputs", str(tmp_path), "--output", str(tmp_path / "out.pt"), "--num-epoch-checkpoints", "3"]
    )
    model = load(tmp_path / "out.pt")["model"]
    assert torch.equal(model["encoder.embed_tokens.weight"], torch.full((3, 2), 10.0))
    assert torch.equal(model["decoder.steps"], torch.tensor([11])), "what is no float is the last checkpoint's"
    assert not list(tmp_path.glob(".*.tmp"))


def test_a_run_may_have_gone_on_since_learnt_shares_have_an_axis(tmp_path):
    shares = {"old": torch.tensor(0.5), "new": torch.tensor([1.0])}
    paths = [checkpoint(tmp_path / f"{age}.pt", 1.0, tensors={"alpha": share}) for age, share in shares.items()]
    assert average_checkpoints.average(paths)["model"]["alpha"].equal(torch.tensor([0.75]))


def test_upper_bound_and_updates(tmp_path):
    for number in (100, 200, 1000):
        checkpoint(tmp_path / f"checkpoint_1_{number}.pt", float(number))
    chosen = average_checkpoints.select([tmp_path], num_updates=2, upper_bound=900)
    assert [path.name for path in chosen] == ["checkpoint_1_100.pt", "checkpoint_1_200.pt"]


def test_tied_tensors_stay_tied(tmp_path):
    state = average_checkpoints.average(epochs(tmp_path, 2))
    torch.save(state, tmp_path / "out.pt")
    model = load(tmp_path / "out.pt")["model"]
    assert model["encoder.embed_tokens.weight"].data_ptr() == model["decoder.embed_tokens.weight"].data_ptr()
    assert "last_optimizer_state" not in state


def test_equal_checkpoints_average_to_themselves(tmp_path):
    noise = {"w": torch.randn(50, generator=torch.Generator().manual_seed(1)).half()}
    paths = [checkpoint(tmp_path / f"checkpoint{n}.pt", 1.0, dtype=torch.float16, tensors=noise) for n in range(10)]
    averaged = average_checkpoints.average(paths)["model"]["w"]
    assert averaged.dtype == torch.float32
    assert torch.equal(averaged, noise["w"].float())


def test_half_precision_neither_overflows_nor_rounds(tmp_path):
    values = (60000.0, 60032.0)  # neighbours in float16, whose largest number is 65504
    paths = [checkpoint(tmp_path / f"checkpoint{v}.pt", v, dtype=torch.float16) for v in values]
    assert average_checkpoints.average(paths)["model"]["encoder.embed_tokens.weight"][0, 0] == 60016


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        ({"ea_alpha": 0.5}, "ea_alpha is 0.1"),
        ({"tensors": {"surplus": torch.ones(1)}}, "surplus is absent"),
        ({"tensors": {"encoder.embed_tokens.weight": torch.ones(3, 5)}}, r"encoder.embed_tokens.weight is \(3, 2\)"),
        ({"dtype": torch.float16}, "float32"),
        ({"seed": 2}, "seed is 1 in"),
        ({"task": {"left_pad_source": True}}, "left_pad_source is absent"),
    ],
    ids=["setting", "key", "shape", "type", "seed", "side of padding"],
)
def test_refuses_checkpoints_that_differ(tmp_path, other, difference):
    paths = [checkpoint(tmp_path / "checkpoint1.pt", 1.0), checkpoint(tmp_path / "checkpoint2.pt", 1.0, **other)]
    with pytest.raises(UserError, match=difference) as refusal:
        average_checkpoints.average(paths)
    assert all(path.name in str(refusal.value) for path in paths)


@pytest.mark.parametrize(("name", "value"), [("dropout", 0.2), ("lr", [0.002])])
def test_two_trainings_of_one_model_and_seed_are_told_apart_by_how_they_learnt(tmp_path, name, value):
    """A run that was resumed with other settings stays one run."""
    for folder in ("one", "other"):
        (tmp_path / folder).mkdir()
    first, resumed, other = (
        checkpoint(tmp_path / place, 1.0, **{name: one})
        for place, one in (("one/a.pt", 0.1), ("one/b.pt", value), ("other/b.pt", value))
    )
    average_checkpoints.average([first, resumed])
    with pytest.raises(UserError, match=f"{name} is 0.1"):
        average_checkpoints.average([first, other])


def test_a_checkpoint_counts_once(tmp_path):
    one = checkpoint(tmp_path / "checkpoint1.pt", 1.0, updates=100)
    (tmp_path / "link.pt").symlink_to(one)
    with pytest.raises(UserError, match=r"--inputs \S+link\.pt: is given twice"):
        average_checkpoints.select([one, tmp_path / "link.pt"])
    last = checkpoint(tmp_path / "checkpoint_last.pt", 1.0, updates=100)
    with pytest.raises(UserError, match=r"checkpoint1\.pt and \S+checkpoint_last\.pt were both made after 100 updates"):
        average_checkpoints.average([one, last])
    may_differ = {"data": "elsewhere", "eval_bleu": True}
    average_checkpoints.average([one, checkpoint(tmp_path / "checkpoint2.pt", 1.0, updates=200, task=may_differ)])


def test_refuses_fewer_than_n(tmp_path):
    epochs(tmp_path, 3)
    with pytest.raises(UserError, match="expected 4 epoch checkpoints, found 3"):
        average_checkpoints.select([tmp_path], num_epochs=4)


def test_the_last_n_are_of_one_run(tmp_path):
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        epochs(tmp_path / name, 2)
    with pytest.raises(UserError, match="those of one run; give its folder alone"):
        average_checkpoints.select([tmp_path / "one", tmp_path / "other"], num_epochs=1)


def test_an_input_is_never_written_over(tmp_path):
    epochs(tmp_path, 2)
    path, link = tmp_path / "checkpoint2.pt", tmp_path / "link.pt"
    before = path.read_bytes()
    link.symlink_to(path)
    for output in (path, link):
        with pytest.raises(SystemExit, match="is one of the checkpoints to average"):
            average_checkpoints.main(
                ["--inputs", str(tmp_path), "--num-epoch-checkpoints", "2", "--output", str(output)]
            )
    assert path.read_bytes() == before


@pytest.mark.parametrize("name", ["checkpoint9.pt", "checkpoint_best.pt", "link.pt"])
def test_a_training_checkpoint_is_not_written_over(tmp_path, name):
    inputs = epochs(tmp_path, 3)[1:]
    (tmp_path / "checkpoint_best.pt").write_bytes(b"kept")
    (tmp_path / "link.pt").symlink_to("checkpoint_best.pt")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    result = run("--inputs", *inputs, "--output", tmp_path / name)
    assert result.returncode == 1
    assert f"--output {tmp_path / name}: " in result.stderr and "training's own checkpoints" in result.stderr
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_an_average_in_a_run_is_its_model_from_then_on(tmp_path):
    """And one that is written elsewhere changes nothing."""
    folder = tmp_path / "run"
    folder.mkdir()
    epochs(folder, 3)
    for number in (2, 1):
        result = run("--inputs", folder, "--num-epoch-checkpoints", number, "--output", folder / f"average{number}.pt")
        assert f"it is the model of {folder}" in result.stdout
        assert Run(folder).model().name == f"average{number}.pt"
    result = run("--inputs", folder, "--num-epoch-checkpoints", 3, "--output", tmp_path / "average3.pt")
    assert "is the model" not in result.stdout
    assert Run(folder).model().name == "average1.pt"
    assert not (tmp_path / "model.json").exists()


def test_a_full_disk_is_one_line(tmp_path):
    result = run("--inputs", checkpoint(tmp_path / "checkpoint1.pt", 1.0), "--output", "/dev/full")
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert "average_checkpoints: /dev/full: could not be written" in result.stderr.splitlines()[-1]


def test_refuses_weights_that_are_not_finite(tmp_path):
    path = checkpoint(tmp_path / "checkpoint1.pt", 1.0, tensors={"w": torch.tensor([float("nan")])})
    with pytest.raises(UserError, match="w holds NaN"):
        average_checkpoints.average([path])


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (lambda whole: b"", "empty"),
        (lambda whole: whole[: int(0.9 * len(whole))], "torn or damaged"),
        (lambda whole: b"torn", "torn or damaged, or not a checkpoint"),
        (lambda whole: b"\x80", "torn or damaged, or not a checkpoint"),
        (lambda whole: b"hello, I am not a checkpoint at all\n", "torn or damaged, or not a checkpoint"),
    ],
    ids=["empty", "torn", "four bytes", "one byte", "text"],
)
def test_any_bytes_are_damaged_and_nothing_worse(tmp_path, content, reason):
    path = checkpoint(tmp_path / "c.pt", 1.0)
    path.write_bytes(content(path.read_bytes()))
    with pytest.raises(DamagedError, match=rf"c\.pt: .*{reason}"):
        load(path)


def test_other_files_are_refused(tmp_path):
    torch.save({"weights": torch.ones(1)}, tmp_path / "weights.pt")
    (tmp_path / "folder.pt").mkdir()
    for name in ("weights.pt: not a fairseq checkpoint", "absent.pt: no such file", "folder.pt: is a folder"):
        with pytest.raises(UserError, match=name):
            load(tmp_path / name.partition(":")[0])


def run(*arguments):
    command = [*tool("training.average"), *map(str, arguments)]
    return warm.run(command, capture_output=True, text=True, check=False)
