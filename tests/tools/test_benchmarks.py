"""scripts/benchmark_*.sh: fair turns, the models that they name, their JSON, and their errors."""

import json
import shlex
import sys
from unittest import mock

import numpy
import pytest
from fairseq.optim import adam
from helpers.mistakes import check_refusal, mistakes

from ea_artifacts.command import UserError
from ea_fairseq.optim import FairseqAdam
from ea_tools.bench import attention as benchmark_attention
from ea_tools.bench import common as benchmark
from ea_tools.bench import decoding as benchmark_decoding
from ea_tools.bench import options, start
from ea_tools.bench import training as benchmark_training
from ea_tools.training import products

SMALL = ["--repetitions", "1", "--batches", "2", "--device", "cpu"]
ORIGIN = {"command", "commit", "device", "versions", "date", "threads", "options", "load_average", "results"}


@pytest.fixture
def small(monkeypatch):
    """Flags of a benchmark that takes a second: its sentences are few and short."""
    lengths = numpy.array([(3 + number % 20, 2 + number % 20) for number in range(200)])
    monkeypatch.setattr(benchmark, "generate_lengths", lambda count: lengths)
    return SMALL


def result_of(name, path, *flags):
    """Run a benchmark's command in this process and read its file, which has the command as it was typed."""
    words = [*map(str, flags), "--output", str(path)]
    with mock.patch.object(sys, "argv", ["python", name, *words]):
        start.main()
    record = json.loads(path.read_text())
    assert record.keys() >= ORIGIN
    assert shlex.split(record["command"]) == [f"scripts/benchmark_{name}.sh", *words]
    return record


def test_batches_are_short_and_long_in_random_order(monkeypatch):
    lengths = numpy.array([(5 + number % 50, 4 + number % 50) for number in range(500)])
    monkeypatch.setattr(benchmark, "generate_lengths", lambda count: lengths)
    sentences = benchmark.random_sentences(benchmark.make_task(benchmark.configuration("transformer")))
    batches = benchmark.pick(sentences, benchmark.batches_of(sentences, max_tokens=300), 6)
    sources = [benchmark.describe(batch)["source"] for batch in batches]
    assert len(sources) == 6 and min(sources) < 20 and max(sources) > 45
    assert sorted(sources) != sources
    with pytest.raises(UserError, match="no sentence has at most 4 tokens"):
        benchmark.batches_of(sentences, max_tokens=4)


def test_candidates_take_turns():
    called = []
    candidates = {name: lambda item, name=name: called.append((name, item)) or 7 for name in ("ours", "stock")}
    times = benchmark.interleave(candidates, "abc", 4, "cpu", "label")
    assert len(called) == 2 * 3 * 5
    timed = called[6:]  # after the warm-up
    for pair in zip(timed[::2], timed[1::2], strict=True):
        assert {name for name, _ in pair} == {"ours", "stock"}
        assert len({item for _, item in pair}) == 1
    first = [name for name, _ in timed[::2]]
    assert first.count("ours") == first.count("stock")
    assert first[:3] != first[3:6]  # the batch that ours began with, stock begins with next time
    assert {kind: numpy.shape(times[kind]["ours"]) for kind in times} == dict.fromkeys(times, (4, 3))
    assert times["tokens"]["stock"] == [[7, 7, 7]] * 4


def test_ratio_is_of_neighbours_in_time():
    """The machine is ten times as slow in the second repetition, for both: no ratio may show it."""
    slow = numpy.array([[1.0], [10.0], [1.0]])
    seconds = {"ours": slow * [[2.0, 4.0]], "stock": slow * [[1.0, 3.0]]}
    tokens = {name: numpy.full((3, 2), 12) for name in seconds}
    speeds = benchmark.speeds({"seconds": seconds, "tokens": tokens})
    assert speeds["ratio"] == {**dict.fromkeys(("median", "q1", "q3"), pytest.approx(4 / 6)), "count": 3}
    assert speeds["tokens_per_second"]["ours"]["median"] == pytest.approx(24 / 6)
    assert speeds["tokens_per_second"]["stock"]["median"] == pytest.approx(24 / 4)


def test_training(tmp_path, small):
    record = result_of("training", tmp_path / "t.json", *small, "--max-tokens", 60, "--memory-batches", 0)
    (result,) = record["results"]
    assert record["benchmark"] == "training"
    assert record["options"]["max_tokens"] == 60
    assert result["architectures"] == {"ours": "ea_transformer_lite", "stock": "transformer_lite"}
    assert numpy.shape(result["times"]["seconds"]["ours"]) == (1, 2)
    assert result["times"]["tokens"]["ours"] == [[batch["tokens"] for batch in result["batches"]]]
    one_pass = {name: sum(table[0]) for name, table in result["times"]["seconds"].items()}
    assert result["ratio"]["median"] == pytest.approx(one_pass["stock"] / one_pass["ours"])
    flat = "ours, flat_adam"
    assert result["ratios"][flat]["median"] == pytest.approx(one_pass["stock"] / one_pass[flat])


def test_training_trains_as_the_recipe_does():
    args = options.training(["--max-tokens", "60"])
    trainer = benchmark_training.trainer(args, "ea_transformer_lite", "cpu", "fp32")
    (batch,) = benchmark_training.choose(args, trainer.task, 16, 1)
    assert benchmark.describe(batch) == {"sentences": 3, "source": 16, "target": 16, "tokens": 48}
    embedding = trainer.model.encoder.embed_tokens.weight.detach().clone()
    assert benchmark_training.training_step(trainer)([batch]) == 48  # the learning rate still is 0
    benchmark_training.training_step(trainer)([batch])
    assert (trainer.model.encoder.embed_tokens.weight != embedding).any()
    assert type(trainer.optimizer) is adam.FairseqAdam
    flat = benchmark_training.trainer(args, "transformer_lite", "cpu", "fp32", "flat_adam")
    assert type(flat.optimizer) is FairseqAdam
    state = trainer.optimizer.optimizer.state
    assert all(state[parameter]["exp_avg"].any() for parameter in trainer.model.parameters())  # all have had gradients
    settings = trainer.cfg.model.dropout, trainer.cfg.model.ea_alpha, trainer.cfg.criterion.label_smoothing
    assert settings == (0.2, 0.1, 0.1)
    assert trainer.get_num_updates() == 2


@pytest.mark.slow
def test_decoding(tmp_path, small, monkeypatch):
    """All decode as many steps, so that their times can be compared."""
    small_pair = {name: f"{arch} --encoder-layers 1 --decoder-layers 1" for name, arch in options.PAIRS["lite"].items()}
    monkeypatch.setitem(options.PAIRS, "lite", small_pair)
    monkeypatch.setattr(benchmark_decoding, "FULL", 40)
    flags = ["--exported", "--beam", 2, "--batch", 3, "full"]
    three, full = result_of("decoding", tmp_path / "d.json", *small, *flags)["results"]
    assert (three["batch"], full["batch"], three["beam"]) == ("3", "full", 2)
    assert all(batch["sentences"] == 3 for batch in three["batches"])
    assert max(batch["sentences"] for batch in full["batches"]) > 1
    for result in (three, full):
        steps = [batch["sentences"] * round(batch["tokens"] / batch["sentences"]) for batch in result["batches"]]
        tokens = result["times"]["tokens"]
        assert {"ours", "stock", "exported", "exported int8"} <= tokens.keys()
        assert all(counts == [steps] for counts in tokens.values())
        assert result["ratios"].keys() == tokens.keys() - {"stock"}


GROWTH = ["--growth", "--max-tokens", 64, "--repetitions", 2, "--device", "cpu"]


@pytest.mark.slow
def test_growth_and_the_memory_of_each_model_alone(tmp_path):
    record = result_of("training", tmp_path / "g.json", *GROWTH, "--longest", 32, "--memory-batches", 0)
    record["results"] += result_of("training", tmp_path / "m.json", *GROWTH, "--longest", 16)["results"]
    assert [result["length"] for result in record["results"]] == [16, 32, 16]
    for result in record["results"]:
        assert result["batches"] == [
            {"sentences": 64 // result["length"], "source": result["length"], "target": result["length"], "tokens": 64}
        ]
    # an optimizer keeps two numbers for each parameter
    assert all(used["peak"] - used["before"] > 2 * 4 * 4e6 for used in record["results"][-1]["memory"].values())


def test_attention(tmp_path, monkeypatch):
    flags = ["--repetitions", 2, "--device", "cpu", "--tokens", 48, "--longest", 16, "--heads", 4]
    monkeypatch.setattr(benchmark_attention, "SHORTEST_TIMING", 0)
    record = result_of("attention", tmp_path / "a.json", *flags, "--paths", "ours", "sdpa")
    assert [result["kind"] for result in record["results"]] == ["encoder", "decoder", "cross"]
    for result in record["results"]:
        assert result["difference_from_plain"]["ours"] < 1e-5  # outputs and gradients
        assert result["paths"].keys() == {"ours", "sdpa"}
        for passes in result["paths"].values():
            for cost in passes.values():
                assert min(cost["milliseconds"]["median"], cost["floor"]["milliseconds"]) > 0


@pytest.mark.parametrize("kind", benchmark_attention.KINDS)
def test_floor_counts_what_must_be_done(kind):
    """Pixel by pixel and tap by tap."""
    heads, length, head_dim, kernel, batch = 2, 5, 3, 3, 7
    pixels = [(i, j) for i in range(length) for j in range(length) if kind != "decoder" or j <= i]
    taps = [(a, b) for a in range(kernel) for b in range(kernel) if kind != "decoder" or b <= a]
    multiply_adds = batch * heads * sum(head_dim + heads * len(taps) + head_dim for _ in pixels)
    floor = benchmark_attention.floor(batch, heads, length, head_dim, kernel, 4, kind == "encoder", kind)
    assert floor["forward"]["flops"] == 2 * multiply_adds
    vectors, maps = batch * heads * length * head_dim, batch * heads * length**2 * (kind == "encoder")
    assert floor["forward"]["bytes"] == 4 * (4 * vectors + 2 * maps)
    assert floor["forward + backward"]["bytes"] == 4 * (11 * vectors + 5 * maps)


@mistakes("""
    training --recipe nonsense | "'nonsense'"
    training --precision fp16 --device cpu | '--precision fp16 ' GPU
    training --precision bf16 --device cpu | '--precision bf16: '
    attention --kernel-size 4 | '--kernel-size 4 '
    decoding --exported --device cpu --precision fp32 bf16 | --exported
    decoding --output {writes_to} | '--output: {writes_to}: is a folder'
""")
def test_a_mistake_is_named_before_anything_is_measured(words, named, capsys, tmp_path, monkeypatch):
    modules = {"training": benchmark_training, "attention": benchmark_attention, "decoding": benchmark_decoding}
    name, *words = [*words, "--output", tmp_path / "result.json"]
    monkeypatch.setattr(products, "has_bf16_units", lambda: name == "decoding")
    check_refusal(capsys, modules[name].main, words, named, writes_to=tmp_path)
