"""The tools on language models, RoBERTa and BART: maps are collected, sizes are counted."""

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from fairseq import options
from helpers import REPO
from helpers.mistakes import check_refusal, mistakes
from helpers.other_models import BART, LM, ROBERTA
from helpers.toy import save_untrained

from ea_artifacts.checkpoints import told_apart
from ea_artifacts.command import UserError
from ea_tools import profile_model
from ea_tools.maps import draw, statistics
from ea_tools.maps.models import load_model


@pytest.mark.parametrize(
    "arch, heads, layers",
    [("roberta", 12, [12, 0, 0]), ("transformer_lm", 8, [0, 6, 0]), ("bart_base", 12, [6, 6, 6])],
)
@pytest.mark.slow
def test_evolving_adds_its_convolutions_alone(arch, heads, layers):
    there = [side for side, number in zip(("encoder", "decoder"), layers, strict=False) if number]
    narrow = [f"--{side}-{size}embed-dim=96" for side in there for size in ("", "ffn-")]
    plain, evolving = (profile_model.profile(name, narrow) for name in (arch, f"ea_{arch}"))
    assert evolving["parameters"] - plain["parameters"] == sum(layers) * (heads * heads * 9 + heads)
    assert evolving["flops"] > plain["flops"]
    assert set(evolving["flops_by_part"]) == set(plain["flops_by_part"])
    assert set(plain["flops_by_part"]) == set(there)


ONE_BY_ONE = "--sample-break-mode eos --tokens-per-sample 40".split()
SIDES = [*BART, "--max-source-positions", "40", "--max-target-positions", "40"]
MASKED = [*ROBERTA, *ONE_BY_ONE, "--max-positions", "40"]
EVERY, WORDS = ["encoder", "decoder", "cross"], "the dog , the cat . </s>"
#: name -> architecture, task, data, size and other flags; kinds of attention; one side's words, with the task's symbols
MODELS = {
    "lm": ("ea_transformer_lm", "language_modeling", "text", [*LM, *ONE_BY_ONE], ["decoder"], "predicted", WORDS),
    "stock_lm": ("transformer_lm", "language_modeling", "text", [*LM, *ONE_BY_ONE], ["decoder"], "predicted", WORDS),
    "roberta": ("ea_roberta", "masked_lm", "text", MASKED, ["encoder"], "source", f"<s> {WORDS}"),
    "stock_roberta": ("roberta", "masked_lm", "text", MASKED, ["encoder"], "source", f"<s> {WORDS}"),
    "denoiser": (
        *("ea_bart", "denoising", "text", [*SIDES, "--sample-break-mode", "eos", "--mask", "0.3"]),
        *(EVERY, "predicted", f"<s> {WORDS}"),
    ),
    "bart": (
        *("ea_bart", "translation", "toy", [*SIDES, "--source-lang", "de", "--target-lang", "en"]),
        *(EVERY, "source", WORDS),
    ),
}
TEXT = "The dog, the cat."


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """Models of every kind with random weights, by the names of `MODELS`, and their data."""
    folder = tmp_path_factory.mktemp("trained")
    places, paths = {"toy": data, "text": folder / "text"}, {}
    one_side = ["bash", REPO / "data-prep/one-side.sh", data, "en", places["text"]]
    subprocess.run(one_side, check=True, capture_output=True)
    for name, (arch, task, where, flags, *_) in MODELS.items():
        words = [str(places[where]), "--arch", arch, "--task", task, *flags]
        args = options.parse_args_and_arch(options.get_training_parser(), words)
        paths[name] = save_untrained(args, places[where], folder / f"{name}.pt")
    return SimpleNamespace(**paths, data=places)


def drawn(trained, folder, name, *more):
    """The .npz file of what plot_attention.sh sees."""
    files = [folder / f"a{suffix}" for suffix in (".npz", ".png", ".html")]
    command = ["--checkpoint", getattr(trained, name), "--source", TEXT, "--out", *files, *more]
    draw.main(list(map(str, command)))
    assert all(file.stat().st_size > 1000 for file in files)
    return numpy.load(files[0])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.slow
def test_pictures_of_every_model(trained, tmp_path, name):
    *_, kinds, side, text = MODELS[name]
    arrays = drawn(trained, tmp_path, name, "--words")
    assert [kind for kind in draw.KINDS if f"{kind}.1.weights" in arrays] == kinds
    assert " ".join(arrays[f"words.{side}"]) == text
    if len(kinds) == 1:
        assert f"{kinds[0]}.2.rollout" in arrays  # through a language model, too


@pytest.mark.parametrize("name", MODELS)
def test_text_is_read_as_the_task_reads_it(trained, name):
    """Token by token as fairseq's own data set reads the first sentences of a split."""
    loaded = load_model(getattr(trained, name))
    loaded.task.load_dataset("valid")
    dataset = loaded.task.dataset("valid")
    text = trained.data["toy"] / "raw/valid.en" if MODELS[name][2] == "text" else loaded.data / "raw/valid.de"
    for number, line in enumerate(text.read_text().splitlines()[:4]):
        source, target = loaded.sentences(line)
        sample = dataset[number]
        if loaded.sides == ("decoder",):
            assert loaded.reads(target)[1].tolist() == sample["source"].tolist()
            assert target.ids.tolist() == sample["target"].tolist()
        elif name == "denoiser":
            batch = dataset.collater([sample])
            assert target.ids.tolist() == sample["target"].tolist() == source.ids.tolist()
            assert loaded.reads(target)[1].tolist() == batch["net_input"]["prev_output_tokens"][0].tolist()
        else:
            read = (sample["source"] if name == "bart" else sample["net_input.src_tokens"]).tolist()
            kept = [place for place, word in enumerate(read) if word == source.ids[place]]
            assert len(read) == len(source.ids)
            assert len(kept) >= (0.5 if "roberta" in name else 1) * len(read)  # some of masked_lm's are masked


def test_masks_are_read(trained, tmp_path):
    arrays = drawn(trained, tmp_path, "roberta", "--source", "the dog , the <mask> .", "--words")
    assert arrays["words.source"].tolist() == [*"<s> the dog , the <mask> . </s>".split()]


@pytest.mark.parametrize("name", MODELS)
def test_statistics_of_every_model(trained, tmp_path, name):
    out = tmp_path / "a.json"
    statistics.main(["--run", str(getattr(trained, name)), "--subset", "valid", "--sentences", "6", "--out", str(out)])
    found = json.loads(out.read_text())
    kinds = MODELS[name][4]
    assert found["sentences"] == 6
    assert list(found["statistics"]["normalised"]) == kinds
    layers = [layer for kind in kinds for layer in found["statistics"]["normalised"][kind].values()]
    assert all(0 < layer["run"]["mean"] < 1 for layer in layers)
    assert ("convolution" in found["statistics"]) == (not name.startswith("stock"))


@mistakes("""
    draw --run {lm} --source x --target x | --target: {lm} decoder --source
    draw --run {roberta} --source x --target x | --target: {roberta} encoder
    draw --run {lm} --source x --kind cross | '--kind cross:' lm.pt decoder
    draw --run {roberta} --source x --compare {lm} | '--compare {lm}:' decoder encoder
    draw --run {lm} --source x --data {toy} | {toy} {lm} dict.txt:
    statistics --run {lm} --gold gold | --gold: {lm} language_modeling
    statistics --run {denoiser} --gold gold | --gold: {denoiser} denoising
    statistics --run {roberta} --compare {denoiser} | '--compare {denoiser}:' encoder decoder
    statistics --run {lm} --subset test7 | '--subset test7:' 'test, train, valid'
""")
def test_options_without_a_meaning_are_refused(trained, tmp_path, capsys, words, named):
    main = {"draw": draw, "statistics": statistics}[words[0]].main
    words = [*words[1:], "--out", tmp_path / "a.png"]
    check_refusal(capsys, main, words, named, writes_to=tmp_path, **vars(trained), toy=trained.data["toy"])


def test_two_runs_of_one_name_are_told_apart():
    runs = [Path(f"runs/{recipe}/ea-seed1/average10.pt") for recipe in ("one", "two")]
    assert told_apart(runs) == ["one/ea-seed1/average10.pt", "two/ea-seed1/average10.pt"]
    assert told_apart([Path("a/x/b.pt"), Path("a/y/b.pt")]) == ["x/b.pt", "y/b.pt"]
    assert told_apart([runs[0], runs[0]]) == ["ea-seed1/average10.pt"] * 2
    assert told_apart(runs[:1]) == ["ea-seed1/average10.pt"]


def test_another_task_is_named(trained, tmp_path):
    state = torch.load(trained.lm, weights_only=True)
    state["cfg"]["task"]["_name"] = "speech_to_text"
    torch.save(state, tmp_path / "other.pt")
    with pytest.raises(UserError, match=r"other\.pt .*speech_to_text.* translation, "):
        load_model(tmp_path / "other.pt")
