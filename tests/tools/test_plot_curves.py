"""scripts/plot_curves.sh: the curves are the logs', a resumed run is one run, and seeds become one line."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from helpers.mistakes import check_refusal, mistakes
from matplotlib.figure import Figure

from ea_tools.figures import curves as plot_curves


def journal(updates, level=10.0, wps=100.0, wpb=200.0):
    """Lines of log.jsonl: every 10 updates a training loss, every 20 a validation, every 30 the end of an epoch."""
    for update in updates:
        numbers = {"step": update, "loss": level - update / 10, "wps": wps, "wpb": wpb, "num_updates": float(update)}
        if update % 10 == 0:
            yield json.dumps({"time": 1.0, "tag": "train_inner", **numbers})
        if update % 20 == 0:
            yield json.dumps({"time": 1.0, "tag": "valid", **numbers, "loss": level - update / 20, "bleu": update / 4})
        if update % 30 == 0:
            yield json.dumps({"time": 1.0, "tag": "train", **numbers})


def make(folder, lines=None, seed=1, arch="ea_transformer_lite", flags=None, data="1925d0", **level):
    """The files of a run's folder that are read, as scripts/train.sh leaves them."""
    folder.mkdir(parents=True)
    lines = list(journal(range(1, 61), **level)) if lines is None else lines
    (folder / "log.jsonl").write_text("".join(f"{line}\n" for line in lines))
    ours = {"recipe": "toy", "arch": arch, "data": data, "seed": str(seed)}
    ours |= {"ea-alpha": "0.1"} if arch.startswith("ea_") else {}
    starts = [{"flags": {"seed": str(seed), "cpu": "", **(flags or {})}}]
    (folder / "run.json").write_text(json.dumps({"identity": ours, "starts": starts}))
    return folder


def test_a_run_that_was_killed_is_the_run_that_was_not(tmp_path):
    """Begun again after 15; killed at 47 with a checkpoint of 30; then at 60, in a line; then a torn last line."""
    whole = list(journal(range(1, 101)))
    first, second, third = (list(journal(updates)) for updates in (range(1, 48), range(31, 61), range(51, 101)))
    torn = '{"time": 9.9, "tag": "train_inner", "step": 61, "lo'
    # The dropped lines have other losses, so that a kept one shows.
    first = [re.sub(r'"loss": [\d.]+', '"loss": 99', line) if '"step": 40' in line else line for line in first]
    before = '{"tag": "train_inner", "step": 15, "loss": 99, "wps": 1, "wpb": 1, "num_updates": 15}'
    lines = [before, *first, *second, torn + third[0], *third[1:], torn]
    killed, undisturbed = (plot_curves.read(make(tmp_path / name, of)) for name, of in (("a", lines), ("b", whole)))
    assert killed.points.keys() == undisturbed.points.keys()
    for name in killed.points:
        np.testing.assert_array_equal(killed.points[name], undisturbed.points[name])
    np.testing.assert_allclose(killed.clock, undisturbed.clock)


def test_a_run_of_the_records_by_its_name(tmp_path, capsys):
    archs = ("transformer_lite", "ea_transformer_lite")
    names = [f"multi30k-laptop-en-de/{arch}-seed{seed}" for arch in archs for seed in "12"]
    plot_curves.main([*names, "--out", str(tmp_path / "curves.png")])
    assert re.findall(r"^(\S+) +1,500 ", capsys.readouterr().out, re.M) == names
    labels = [line.label for line in plot_curves.group(plot_curves.read_all(map(Path, names)))]
    assert labels == [f"{arch} (seeds 1, 2)" for arch in archs]


def test_points_and_axes(tmp_path):
    """An update takes 200 tokens at 100 a second; losses stand in the middle of the 10 updates that they are of."""
    run = plot_curves.read(make(tmp_path / "run"))
    updates, losses = run.points["train"]
    assert updates.tolist() == [5, 15, 25, 35, 45, 55]
    assert losses.tolist() == [9, 8, 7, 6, 5, 4]
    assert run.points["valid"][0].tolist() == [20, 40, 60]
    assert run.points["bleu"][1].tolist() == [5, 10, 15]
    np.testing.assert_allclose(run.x("hours", updates), updates * 2 / 3600)
    np.testing.assert_allclose(run.x("epochs", updates), updates / 30)
    assert (run.seed, run.last) == ("1", 60)


OURS, PLAIN = "ea_transformer_lite", "transformer_lite"


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ([{}, {"seed": 2}, {"seed": 3}], {f"{OURS} (seeds 1, 2, 3)": 3}),
        (
            [{}, {"seed": 2}, {"seed": 4, "flags": {"bf16-products": ""}}],
            {f"{OURS}, precision fp32 (seeds 1, 2)": 2, f"{OURS}, precision bf16-products": 1},
        ),
        (
            [{"arch": PLAIN}, {}, {"seed": 2}, {"flags": {"ea-beta": "0.3", "num-workers": "4"}}],
            {PLAIN: 1, f"{OURS} (seeds 1, 2)": 2, f"{OURS}, ea-beta 0.3": 1},
        ),
        ([{"folder": "before"}, {"folder": "after"}], {f"{OURS}, before": 1, f"{OURS}, after": 1}),
        ([{"folder": "a/run"}, {"folder": "b/run"}], {f"{OURS}, run, {{}}/{name}/run": 1 for name in "ab"}),
        ([{"folder": "one"}, {"folder": "two", "data": "77aa01"}], {f"{OURS}, {{}}/one": 1, f"{OURS}, {{}}/two": 1}),
        (
            [{"arch": "ea_bart", "flags": {"lr": "0.1"}}, {"arch": "bart", "flags": {"lr": "0.2"}}],
            {"ea_bart, lr 0.1": 1, "bart, lr 0.2": 1},
        ),
    ],
    ids=["seeds", "another precision", "another flag", "a seed twice", "a name twice", "other data", "architectures"],
)  # fmt: skip
def test_runs_that_differ_in_the_seed_alone_are_one_line(tmp_path, runs, expected):
    """The label of any other line says in what it differs; data by the run's folder, and not by a digest."""
    folders = [make(tmp_path / run.pop("folder", str(number)), **run) for number, run in enumerate(runs)]
    lines = plot_curves.group([plot_curves.read(path) for path in folders])
    assert {line.label.replace(str(tmp_path), "{}"): len(line.runs) for line in lines} == expected


def line_of(*folders):
    """The one line of these runs."""
    (line,) = plot_curves.group([plot_curves.read(folder) for folder in folders])
    return line


def test_mean_and_range_as_far_as_all_seeds_have_got(tmp_path):
    long = make(tmp_path / "long")
    line = line_of(long, make(tmp_path / "short", list(journal(range(1, 41), level=12)), seed=2))
    x, mean, lowest, highest = (values.tolist() for values in plot_curves.band(line, "train", "updates"))
    assert x == [5, 15, 25, 35]
    assert (mean, lowest, highest) == ([10, 9, 8, 7], [9, 8, 7, 6], [11, 10, 9, 8])
    line = line_of(long, make(tmp_path / "new", list(journal(range(1, 11))), seed=2))  # without a validation
    assert [len(plot_curves.band(line, name, "updates")[0]) for name in ("valid", "train")] == [0, 1]


def test_seeds_with_other_updates_are_compared_at_the_same_ones(tmp_path):
    line = line_of(make(tmp_path / "fast"), make(tmp_path / "slow", seed=2, wps=50.0))
    x, _, lowest, highest = plot_curves.band(line, "valid", "hours")
    np.testing.assert_allclose(x * 3600 / 2, [40, 60])  # from the first of the slow one to the last of the fast one
    np.testing.assert_allclose(lowest, 10 - x * 3600 / 2 / 20)
    np.testing.assert_allclose(highest, 10 - x * 3600 / 4 / 20)


def test_picture_and_table(tmp_path, capsys):
    runs = [make(tmp_path / "runs" / str(seed), seed=seed, level=10 + seed) for seed in (1, 2)]
    out = tmp_path / "new" / "curves.png"
    plot_curves.main([*map(str, runs), "--out", str(out), "--x", "updates", "hours"])
    assert out.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert re.search(r"runs/1 +60 +2\.0 +0\.03 +5\.000 +8\.000: 8\.000 @ 60 +15\.00: 15\.00 @ 60 +@ 60\n", printed)
    assert re.search(r"runs/2 .* -\n", printed)  # never as low as the first run
    assert list(out.parent.iterdir()) == [out]


@mistakes("""
    {tmp}/nowhere | {tmp}/nowhere:
    {tmp}/run {tmp}/empty | '{tmp}/empty: has no log.jsonl' scripts/train.sh
    {tmp}/silent | {tmp}/silent/log.jsonl:
    {tmp}/notes.txt | {tmp}/notes.txt: log.jsonl
    {tmp}/foreign | '{tmp}/foreign/run.json: identity:'
    {tmp}/half | '{tmp}/half/run.json: identity: arch '
    {tmp}/torn.jsonl | '{tmp}/torn.jsonl:1: not JSON'
    {tmp}/run {tmp}/silent/../run | twice {tmp}/run
    {tmp}/run --out {tmp}/curves.gif | curves.gif: '.png, .svg, .pdf'
    {tmp}/run --out {tmp}/folder.png | folder.png:
    {tmp}/run --x days | days
""")
def test_a_mistake_is_named_and_leaves_no_file(tmp_path, capsys, words, named):
    make(tmp_path / "run")
    make(tmp_path / "silent", lines=[])
    (make(tmp_path / "foreign") / "run.json").write_text('{"arch": "x"}')
    (make(tmp_path / "half") / "run.json").write_text('{"identity": {"recipe": "x"}}')
    (tmp_path / "torn.jsonl").write_text("\n".join(['{"identity": {"recipe": "x", "ar', *journal(range(1, 21))]))
    (tmp_path / "notes.txt").write_text("what to buy: 3 apples")
    for name in ("empty", "folder.png"):
        (tmp_path / name).mkdir()
    out = [] if "--out" in words else ["--out", tmp_path / "out/curves.png"]
    check_refusal(capsys, plot_curves.main, [*words, *out], named, writes_to=tmp_path, tmp=tmp_path)


def drawn(monkeypatch, tmp_path, *runs):
    """The figure of these runs' curves."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **options: (figures.append(figure), path.touch()))
    plot_curves.main([*map(str, runs), "--x", "updates", "--out", str(tmp_path / "curves.png")])
    return figures[0]


@pytest.mark.parametrize(
    ("updates", "lines", "said"),
    [
        (200, [*journal(range(1, 11), level=1e6)], "above the picture: "),
        (60, [line.replace('"loss": 4.0', '"loss": NaN') for line in journal(range(1, 61))], "diverged: "),
    ],
)
def test_a_run_that_diverged_is_seen_and_said(monkeypatch, tmp_path, updates, lines, said):
    """Also one that ended in the first tenth of the others' time, all of which the picture used to crop."""
    good = make(tmp_path / "good", list(journal(range(1, updates + 1), level=updates / 6)))
    figure = drawn(monkeypatch, tmp_path, good, make(tmp_path / "wild", lines, arch="transformer_lite"))
    assert figure.axes[0].get_ylim()[1] < 40, "it does not press the others together"
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels[0] == "ea_transformer_lite"
    assert labels[1].startswith(f"transformer_lite ({said}")


def test_a_log_without_a_loss_is_left_out(tmp_path, capsys):
    silent, new = make(tmp_path / "silent", lines=[]), make(tmp_path / "new")
    (new / "log.jsonl").unlink()
    plot_curves.main([*map(str, (silent, make(tmp_path / "run"), new)), "--out", str(tmp_path / "curves.png")])
    said = capsys.readouterr()
    for line, named in zip(said.err.splitlines(), (f"{silent}/log.jsonl: ", f"{new}: "), strict=True):
        assert f"warning: left out: {named}" in line
    assert "silent" not in said.out
