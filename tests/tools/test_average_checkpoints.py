"""scripts/average_checkpoints.sh: right means, tied tensors, and refusals that name the difference."""

import argparse

import pytest
import torch
from helpers.mistakes import check_refusal, mistakes

from ea_artifacts.checkpoints import DamagedError, load
from ea_artifacts.command import UserError
from ea_artifacts.run import Run
from ea_tools.training import average as average_checkpoints


def checkpoint(
    path, value=1.0, *, dtype=torch.float32, tensors=None, seed=1, task=None, criterion=None, updates=None, **settings
):
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
    cfg["criterion"] = criterion or {}
    state = {"args": None, "cfg": cfg, "model": model, "extra_state": {}, "last_optimizer_state": {"big": embedding}}
    if updates is not None:
        state["optimizer_history"] = [{"num_updates": 1}, {"num_updates": updates}]
    torch.save(state, path)
    return path


def epochs(folder, count, **options):
    return [checkpoint(folder / f"checkpoint{n}.pt", float(n), **options) for n in range(1, count + 1)]


@pytest.mark.parametrize(
    ("name", "numbers", "flags", "mean"),
    [
        ("checkpoint{}.pt", range(1, 12), "--num-epoch-checkpoints 3", 10),  # by number: by name 9 would be the last
        ("checkpoint_1_{}.pt", (100, 200, 1000), "--num-update-checkpoints 2", 600),
    ],
)
def test_mean_of_the_last_n(tmp_path, name, numbers, flags, mean):
    for number in numbers:
        checkpoint(tmp_path / name.format(number), float(number))
    average_checkpoints.main(["--inputs", str(tmp_path), "--output", str(tmp_path / "out.pt"), *flags.split()])
    state = load(tmp_path / "out.pt")
    embedding, tied = (state["model"][f"{side}.embed_tokens.weight"] for side in ("encoder", "decoder"))
    assert torch.equal(embedding, torch.full((3, 2), float(mean)))
    assert embedding.data_ptr() == tied.data_ptr()
    last = {10: 11, 600: 1000}[mean]
    assert torch.equal(state["model"]["decoder.steps"], torch.tensor([last])), "what is no float is the last's"
    assert "last_optimizer_state" not in state
    assert not list(tmp_path.glob(".*.tmp"))


def test_weights_that_lie_in_one_tensor_stay_apart(tmp_path):
    """As --optimizer flat_adam has them."""
    one, other = torch.arange(8.0).view(2, 4)
    path = checkpoint(tmp_path / "checkpoint1.pt", tensors={"one": one, "other": other})
    averaged = average_checkpoints.average([path])["model"]
    assert averaged["one"].equal(one) and averaged["other"].equal(other)


def test_half_precision_neither_overflows_nor_rounds(tmp_path):
    """60000 and 60032 are neighbours in float16, whose largest number is 65504."""
    noise = {"w": torch.randn(50, generator=torch.Generator().manual_seed(1)).half()}
    values = [60000.0, 60032.0] * 5
    paths = [
        checkpoint(tmp_path / f"checkpoint{number}.pt", value, dtype=torch.float16, tensors=noise)
        for number, value in enumerate(values)
    ]
    averaged = average_checkpoints.average(paths)["model"]
    assert {value.dtype for value in averaged.values()} == {torch.float32, torch.int64}
    assert torch.equal(averaged["w"], noise["w"].float()), "equal weights average to themselves"
    assert averaged["encoder.embed_tokens.weight"][0, 0] == 60016


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        ({"ea_alpha": 0.5}, "ea_alpha is 0.1"),
        ({"decoder_attention_heads": 8}, "decoder_attention_heads is absent"),
        ({"activation_fn": "gelu"}, "activation_fn is absent"),
        ({"tensors": {"surplus": torch.ones(1)}}, "surplus is absent"),
        ({"tensors": {"encoder.embed_tokens.weight": torch.ones(3, 5)}}, r"encoder.embed_tokens.weight is \(3, 2\)"),
        ({"dtype": torch.float16}, "float32"),
        ({"seed": 2}, "seed is 1 in"),
        ({"task": {"left_pad_source": True}}, "left_pad_source is absent"),
    ],
    ids=["setting", "heads", "activation", "key", "shape", "type", "seed", "side of padding"],
)
def test_refuses_checkpoints_that_differ(tmp_path, other, difference):
    paths = [checkpoint(tmp_path / "checkpoint1.pt", 1.0), checkpoint(tmp_path / "checkpoint2.pt", 1.0, **other)]
    with pytest.raises(UserError, match=difference) as refusal:
        average_checkpoints.average(paths)
    assert all(path.name in str(refusal.value) for path in paths)


def test_an_average_in_a_run_is_its_model_from_then_on(tmp_path, capsys):
    """And one that is written elsewhere changes nothing."""
    folder = tmp_path / "run"
    folder.mkdir()
    epochs(folder, 3)
    for number, output, model in ((2, folder, 2), (1, folder, 1), (3, tmp_path, 1)):
        words = ["--inputs", folder, "--num-epoch-checkpoints", number, "--output", output / f"average{number}.pt"]
        average_checkpoints.main([*map(str, words)])
        assert (f"it is the model of {folder}" in capsys.readouterr().out) == (output == folder)
        assert Run(folder).model() == folder / f"average{model}.pt"
    assert not (tmp_path / "model.json").exists()


def test_a_torn_average_is_made_anew(tmp_path):
    epochs(tmp_path, 2)
    (tmp_path / "average2.pt").write_bytes(b"torn")
    path, _ = Run(tmp_path).averaged(2)
    assert path == tmp_path / "eval/average2.pt"
    assert load(path)["extra_state"]["averaged"] == [str(tmp_path / f"checkpoint{number}.pt") for number in (1, 2)]


def test_any_bytes_are_damaged_and_nothing_worse(tmp_path):
    path = checkpoint(tmp_path / "c.pt", 1.0, tensors={"w": torch.ones(5000)})  # PyTorch cannot seek in a part of it
    torn = path.read_bytes()[:-1000]
    for content in (b"", torn, b"torn", b"\x80", b"hello, I am not a checkpoint at all\n"):
        path.write_bytes(content)
        with pytest.raises(DamagedError, match=r"c\.pt: "):
            load(path)
    for state in ({"model": {"w": 1}}, {"model": None}, [torch.ones(1)]):
        torch.save(state, path)
        with pytest.raises(DamagedError, match=r"c\.pt: .*no model weights"):
            load(path)


@mistakes("""
    {run} --num-epoch-checkpoints 4 | {run}: 4 3
    {run} {run}/other --num-epoch-checkpoints 1 | '--inputs {run} {run}/other:'
    {run} | {run}: --num-epoch-checkpoints --num-update-checkpoints
    {run}/checkpoint1.pt {run}/link.pt | '{run}/checkpoint1.pt and {run}/link.pt' 100
    {run}/checkpoint1.pt {run}/checkpoint_last.pt | {run}/checkpoint1.pt {run}/checkpoint_last.pt 100
    {run}/nan.pt | {run}/nan.pt w NaN
    {run}/weights.pt | {run}/weights.pt:
    {run}/absent.pt | {run}/absent.pt:
    {run}/checkpoint1.pt {run}/folder.pt | {run}/folder.pt:
    {run}/checkpoint2.pt --output {run}/checkpoint2.pt | '--output {run}/checkpoint2.pt: '
    {run}/checkpoint1.pt --output {run}/link.pt | '--output {run}/link.pt: '
    {run}/checkpoint2.pt --output {run}/checkpoint9.pt | '--output {run}/checkpoint9.pt: ' checkpoint9.pt average10.pt
    {run}/checkpoint2.pt --output {run}/checkpoint_best.pt | '--output {run}/checkpoint_best.pt: '
    {run}/checkpoint2.pt --output {run}/best.pt | '--output {run}/best.pt: ' checkpoint_best.pt
    {run}/checkpoint2.pt --output /dev/full | 'average_checkpoints: /dev/full: '
""")
def test_mistakes_are_named_and_no_checkpoint_is_written_over(tmp_path, capsys, words, named):
    run = tmp_path / "run"
    for folder in (run, run / "other", run / "folder.pt"):
        folder.mkdir()
    for number, path in enumerate(epochs(run, 3), 1):
        checkpoint(path, 1.0, updates=100 * number)
    checkpoint(run / "checkpoint_last.pt", 1.0, updates=100)
    checkpoint(run / "nan.pt", 1.0, tensors={"w": torch.tensor([float("nan")])})
    torch.save({"weights": torch.ones(1)}, run / "weights.pt")
    (run / "checkpoint_best.pt").write_bytes(b"kept")
    (run / "link.pt").symlink_to("checkpoint1.pt")
    (run / "best.pt").symlink_to("checkpoint_best.pt")
    output = [] if "--output" in words else ["--output", str(run / "average.pt")]
    words = ["--inputs", *words, *output]
    check_refusal(capsys, average_checkpoints.main, words, named, writes_to=tmp_path, run=run)
