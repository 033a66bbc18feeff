"""scripts/reproduce.sh: only missing cells are run, and the table names the source of its numbers."""

import dataclasses
import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import types

import pytest
from helpers.mistakes import check_refusal, fake_command, mistakes, refusal
from helpers.pages import PAGES
from helpers.tables import COMMIT, evaluation, write_evaluation, write_recipe
from helpers.toy import ENVIRONMENT, TINY, script

from ea_artifacts.command import REPO, UserError, parse_flags
from ea_artifacts.files import digest, read_lines
from ea_tools.tables import page, reproduce, rescore, shown, sweep
from ea_tools.tables import table as tables
from ea_tools.tables.records import Records, opened, text_of
from ea_tools.training import launch, recipes, train


def row_of(table, label):
    return next(row for row in table.rows if row.label == label)


@pytest.mark.parametrize(
    ("name", "label", "flags", "run"),
    [
        ("table5", "EA-Transformer-Lite", "", "iwslt14-de-en/ea_transformer_lite"),
        ("table6", "w/o skip connection", "", "iwslt14-de-en/ea_transformer_lite-ea-alpha0"),
        ("table6", "EA-Transformer-Lite", "--gpus 0 --update-freq 1,2 --without lr --without clip-norm",
         "iwslt14-de-en/ea_transformer_lite-update-freq1_2-withoutlr_clip-norm"),
        ("multi30k-laptop-bf16", "EA-Transformer-Lite, products in bfloat16", "",
         "multi30k-laptop-de-en/ea_transformer_lite-precisionbf16"),
    ],
)  # fmt: skip
def test_a_run_is_named_by_its_model_so_that_tables_share_it(name, label, flags, run):
    """A row's own precision is part of the name; other flags of the launch are not."""
    table = tables.read(name)
    row = row_of(table, label)
    changed = row.model_copy(update={"flags": [*row.flags, *flags.split()]})
    assert table.run(changed, table.recipes[0], 1) == f"{run}-seed1"


@pytest.fixture
def toy(data, tmp_path):
    """A table with one column and three rows over the toy corpus, none of which has been run."""
    recipe = write_recipe(tmp_path / "toy.toml", data)
    (tmp_path / "tiny.toml").write_text(
        f'title = "Tiny"\n[[column]]\nrecipe = "{recipe}"\nlabel = "Toy"\nmetric = "tokenised_bleu"\n'
        f'[[row]]\nlabel = "Plain"\narch = "transformer"\nflags = {json.dumps(TINY)}\n'
        f'paper = {{ "{recipe}" = 12.3 }}\n'
        f'[[row]]\nlabel = "Evolving"\narch = "ea_transformer_base"\nflags = {json.dumps(TINY)}\nbaseline = "Plain"\n'
        f'[[row]]\nlabel = "Nobody"\narch = "ea_transformer_lite"\nflags = {json.dumps(TINY)}\n'
    )  # fmt: skip
    return tmp_path


def options(toy, *arguments):
    """The words of a command about the toy table."""
    folders = ["--runs", toy / "runs", "--results", toy / "results", "--average", 2]
    return [*map(str, [toy / "tiny.toml", *folders, *arguments])]


def collect(toy, *arguments):
    """The table that --collect writes."""
    reproduce.main(options(toy, "--collect", *arguments))
    return (toy / "results" / "tiny.md").read_text()


def dry_run(toy, capsys, *arguments):
    """The output of a dry run."""
    capsys.readouterr()
    reproduce.main(options(toy, *arguments, "--dry-run"))
    return capsys.readouterr()


def pretend(toy, label, seed=1, score=10.0, better=True, commit=COMMIT, **changed):
    """Write the files of a run by the table's recipe, with this score; returns its folder."""
    table = tables.read(str(toy / "tiny.toml"))
    recipe, row = recipes.read(table.columns[0].recipe), row_of(table, label)
    folder = toy / "runs" / table.run(row, table.columns[0].recipe, seed)
    references = read_lines(recipe.data / "raw" / "test.en")
    translations = references if better else [line.replace("the", "a") for line in references]
    write_evaluation(folder, evaluation(score, references=digest(references)), translations)
    flags = recipe.flags_for(row.arch) | parse_flags(row.flags) | {"seed": seed, "max-tokens": 256} | changed
    words = parse_flags(recipes.spell_flags(flags))
    start = {"commit": commit, "device": "CPU, two cores", "processes": 1}
    start["flags"] = {name: " ".join(values) for name, values in words.items()}
    record = {"identity": {"recipe": "toy", "data": "abc"}, "command": "scripts/train.sh toy", "starts": [start]}
    (folder / "run.json").write_text(json.dumps(record))
    numbers = {"loss": 3, "num_updates": 1500, "wps": 1000.0, "wpb": 3000.0}
    (folder / "log.jsonl").write_text(json.dumps({"tag": "train_inner", **numbers}) + "\n")
    return folder


def score_again(run, name, score, translations=("other",) * 10):
    """Write the files of another evaluation, by other settings."""
    one = json.loads((run / "eval/test.beam5.average2.json").read_text())
    scores = {kind: {**old, "score": score} for kind, old in one["scores"].items()}
    return write_evaluation(run, one | {"settings_name": name, "scores": scores}, translations)


def test_numbers_in_the_table(toy):
    """Three seeds and a baseline: mean, deviation, difference and its significance, and each seed's p."""
    for seed, plain, evolving in ((2, 10.0, 11.0), (3, 12.0, 13.0), (4, 14.0, 13.0)):
        pretend(toy, "Plain", seed, plain, better=plain > evolving)
        pretend(toy, "Evolving", seed, evolving, better=evolving > plain)
    written = collect(toy, "--seeds", 2, 3, 4, "--gpus", 0, "--max-tokens-valid", 1000)
    assert "| 12.00 ± 2.00 [12.30] |" in written
    assert "| Evolving | Plain |" in written
    assert "| 12.33 ± 1.15, Δ +0.33 ± 1.15 (2 of 3, 1 the other way) |" in written
    line = next(line for line in written.splitlines() if line.startswith("| Evolving | Toy | 2 |"))
    assert "| 11.00 (sacreBLEU 11.00, p 0.001) | 1,500 | 1 | 1.25 | toy | abc |" in line
    assert line.endswith("| beam5.average2 | fp32 | CPU, two cores | cccccccccc | cccccccccc, now |")
    assert "Alike in all runs of a column: Recipe, " in written
    assert "not tested" not in written
    assert (toy / "results" / "tiny.png").stat().st_size > 5000


def test_a_table_says_how_many_checkpoints_are_averaged(toy, capsys):
    path = toy / "tiny.toml"
    path.write_text(f"average = 3\n{path.read_text()}")
    for given, average in (([], 3), (["--average", "4"], 4)):
        reproduce.main([str(path), "--dry-run", *given])
        assert f" --average {average} --subset test" in capsys.readouterr().out


def test_rows_that_differ_in_the_average_alone_share_a_run(toy, capsys):
    path = toy / "tiny.toml"
    path.write_text(
        f'{path.read_text()}[[row]]\nlabel = "Fewer"\narch = "transformer"\nflags = {json.dumps(TINY)}\naverage = 3\n'
    )
    reproduce.main([str(path), "--dry-run", "--rows", "Plain", "Fewer"])
    said = capsys.readouterr().out
    assert said.count("train.sh") == 1
    assert re.findall(r"--average (\d+) --subset test", said) == ["10", "3"]


def test_a_fresh_clone_writes_the_same_table(toy, capsys):
    """From the records alone: without the runs, and without the data that the paired tests were made with."""
    pretend(toy, "Plain", better=False)
    pretend(toy, "Evolving", score=11.0)
    first = collect(toy)
    shutil.rmtree(toy / "runs")
    assert dry_run(toy, capsys).err.count("done already") == 2, "the records are enough"
    write_recipe(toy / "toy.toml", "/nowhere")
    assert collect(toy) == first
    assert "p 0.001" in first


def test_a_difference_counts_where_it_was_tested(toy):
    """The baseline of seed 1 was scored before the data were prepared anew; the models of seed 3 translate alike."""
    for seed in (3, 2, 1):
        folder = pretend(toy, "Plain", seed, better=seed == 3)
        pretend(toy, "Evolving", seed, score=11.0)
    write_evaluation(
        folder, evaluation(references="of before"), read_lines(folder / "eval/test.beam5.average2.hyp.txt")
    )
    written = collect(toy, "--seeds", 1, 2, 3)
    assert "Δ +1.00 ± 0.00 (1 of 2)" in written
    assert "(sacreBLEU 11.00, not tested)" in written
    assert "not alike in everything**: References (Toy)" in written


def test_scores_are_those_of_the_translations(toy, data, capsys, monkeypatch):
    """Each is computed again; a row that differs is named, and rows without their data are counted."""
    name = json.loads((data / "PREP.json").read_text())["name"]
    for label in ("Plain", "Evolving"):
        folder = pretend(toy, label)  # its translations are the references
        scores = {metric: {"score": 100.0, "signature": "s"} for metric in ("sacrebleu", "chrf", "tokenised_bleu")}
        path = folder / "eval/test.beam5.average2.json"
        one = json.loads(path.read_text()) | {"scores": scores, "data": name}
        write_evaluation(folder, one, read_lines(path.with_suffix(".hyp.txt")))
    collect(toy)
    (toy / "data").mkdir()
    (toy / "data/toy").symlink_to(data)
    monkeypatch.setattr(rescore, "REPO", toy)
    words = ["scores", *options(toy)[1:]]
    reproduce.main(words)
    assert capsys.readouterr().out.endswith("rows: 2 recomputed\n")
    path = toy / "results/scores.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[1]["scores"]["chrf"]["score"] -= 0.001
    rows.append(rows[0] | {"run": "toy/other", "references": "others"})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = refusal(capsys, reproduce.main, *words, writes_to=toy)
    assert f"2 recomputed, 1 without the references of {name}" in said
    assert re.findall(r"(\S+), test, beam5.average2: (\w+): ", said) == [(rows[1]["run"], "chrf")]
    text = text_of(data, "test")
    given = text._replace(data=dataclasses.replace(text.data, tokenizer="given"))
    rows[1]["scores"]["tokenised_bleu"]["score"] = 50  # of tokens that came with the text, which are not kept
    found = [list(rescore.differences(rows[1], text.written, one)) for one in (text, given)]
    assert [sorted(line.split(": ")[1] for line in lines) for lines in found] == [["chrf", "tokenised_bleu"], ["chrf"]]
    said = refusal(capsys, reproduce.main, *words, "--results", toy / "empty", writes_to=toy)
    assert f"{toy}/empty: rows: none" in said


def test_two_commands_at_once_lose_no_row(tmp_path):
    """The second waits until the first has written."""

    def second():
        with opened(tmp_path) as records:
            records.add(evaluation(run="toy/second"), ["toy/second"])

    other = threading.Thread(target=second)
    with opened(tmp_path) as records:
        other.start()
        other.join(timeout=0.5)
        records.add(evaluation(run="toy/first"), ["toy/first"])
    other.join(timeout=60)
    records = Records(tmp_path)
    found = {run: records.translations(row) for (run, *_), row in records.rows.items()}
    assert found == {run: [run] for run in ("toy/first", "toy/second")}


def test_a_row_that_is_none_is_named(toy):
    folder, path, other = pretend(toy, "Plain"), toy / "results/scores.jsonl", evaluation()
    del other["tokenizer"]
    collect(toy)
    whole = path.read_text()
    no_number = evaluation(scores={"sacrebleu": {"score": "12", "signature": ""}})
    for line, named in (
        ("<<<<<<< ours", ""),
        (json.dumps(evaluation(run=3)), "run: "),
        (json.dumps({**no_number, "run": "a/b"}), "scores: sacrebleu: score: "),
    ):
        path.write_text(f"{whole}{line}\n")
        with pytest.raises(SystemExit, match=rf"scores\.jsonl:2: {named}"):
            collect(toy)
    path.unlink()
    write_evaluation(folder, other, ["a"])  # of another form: its row would stop every later reading of the records
    with pytest.raises(SystemExit, match=r"test\.beam5\.average2\.json: tokenizer: "):
        collect(toy)
    assert not path.exists()


def test_settings_have_rows_of_their_own(toy):
    """With the same split and run; the columns of translations that no row names any more go."""
    folder = pretend(toy, "Plain")
    collect(toy)
    score_again(folder, "beam5.average3", 12.0)
    collect(toy, "--average", 3)
    rows = {row["settings_name"]: row["scores"] for row in Records(toy / "results").rows.values()}
    scores = {name: kinds["sacrebleu"]["score"] for name, kinds in rows.items()}
    assert scores == {"beam5.average2": 10.0, "beam5.average3": 12.0}
    score_again(folder, "beam5.average3", 13.0, ["another"] * 10)
    collect(toy, "--average", 3)
    records = Records(toy / "results")
    texts = [records.translations(row) for row in records.rows.values()]
    assert texts[1] == ["another"] * 10 != texts[0]
    (path,) = (toy / "results/hypotheses").iterdir()
    assert gzip.decompress(path.read_bytes()).split(b"\n")[0].count(b"\t") == 1


def test_runs_that_are_not_alike_are_told(toy):
    pretend(toy, "Plain", better=False, lr="0.5")
    changed = {"commit": "d" * 40 + " with local changes", "bf16-products": True}
    folder = pretend(toy, "Evolving", score=11.0, **changed)
    record = json.loads((folder / "run.json").read_text())
    record["identity"]["data"] = "xyz"
    record["starts"].append({**record["starts"][0], "commit": "e" * 40})
    (folder / "run.json").write_text(json.dumps(record))
    written = collect(toy)
    unlike = re.search("not alike in everything.*: (.*)", written)[1]
    assert unlike == "Recipe (Toy); Training data (Toy); Precision (Toy); Trained at (Toy)."
    assert "| toy; lr 0.5, the recipe says 0.001 | abc |" in written
    assert "| toy | xyz |" in written
    assert "| fp32 | CPU, two cores |" in written
    device = "| bf16-products | CPU, two cores, bf16-products |"
    assert f"{device} dddddddddd with local changes, then eeeeeeeeee |" in written


def test_a_score_by_other_settings_is_not_the_tables(toy, capsys):
    evolving = pretend(toy, "Evolving")
    score_again(evolving, "beam1.average1", 8.0).with_name("test.beam5.average2.json").unlink()
    assert "| Evolving | Toy | 1 |" not in collect(toy)
    assert f"--run {evolving}\n" in dry_run(toy, capsys).out


def test_a_training_that_had_not_ended_goes_on(toy, capsys):
    """Its score is in the table, with how far it was, and is none that is done, nor in the place of a finished one."""
    plain, evolving = (pretend(toy, label) for label in ("Plain", "Evolving"))
    write_evaluation(plain, evaluation(unfinished="7 of 80 updates"), ["a"] * 10)
    written = collect(toy)
    assert "**Scored before the end of their training**: Plain, toy, seed 1 (7 of 80 updates)." in written
    write_evaluation(evolving, evaluation(5.0, unfinished="7 of 80 updates"), ["other"] * 10)
    logs = sorted(path.read_text() for path in (toy / "results/logs").iterdir())
    (evolving / "run.json").write_text((evolving / "run.json").read_text().replace("toy", "another"))
    assert collect(toy) == written
    assert logs == sorted(path.read_text() for path in (toy / "results/logs").iterdir())
    said = dry_run(toy, capsys)
    assert f"--run {plain}\n" in said.out
    assert re.findall("done already: (.*?),", said.err) == ["Evolving"]
    write_evaluation(plain, evaluation(), ["a"] * 10)
    assert "done already: Plain" in dry_run(toy, capsys).err


def test_seeds_choose_what_is_run_and_hide_nothing(toy):
    for seed in (1, 4):
        pretend(toy, "Plain", seed, 10.0 + seed)
    assert "| Plain | Toy | 4 |" not in collect(toy)
    written = collect(toy, "--seeds", 4)
    assert "| Plain | Toy | 1 | 11.00 (" in written
    assert "| Plain | Toy | 4 | 14.00 (" in written


def test_readme_shows_the_repositorys_own_results_alone(toy, monkeypatch):
    """Not those of `--results mine`, typed in the repository's folder."""
    pages = [toy / name for name in ("README.md", "docs/page.md", "mine/README.md")]
    for path in pages:
        path.parent.mkdir(exist_ok=True)
        path.write_text("<!-- tiny -->\nold\n<!-- end of tiny -->\n")
    monkeypatch.setattr(page, "REPO", toy)
    pretend(toy, "Plain")
    reproduce.main(options(toy, "--collect", "--results", toy / "mine"))
    assert ["old" in path.read_text() for path in pages] == [True, True, False]
    collect(toy)
    assert ["old" in path.read_text() for path in pages] == [False, False, False]


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('"tokenised_bleu"', '"comet"', "column: 0: metric = 'comet': "),
        ('"tokenised_bleu"', '"compound_split_bleu"', "Toy: metric compound_split_bleu: "),
        ('"Evolving"', '"Plain"', "row: 'Plain' is there twice"),
        ("[[column]]", "seed = [1]\n[[column]]", "seed: there is no such key here; did you mean seeds"),
        ('"transformer"', '"transforme"', "Plain: arch transforme: "),
        ("[[column]]", "[[columns]]", "column is missing"),
        ('"transformer"', '"transformer"\npaper = {other = 1}', "Plain: paper: other is no column"),
        ('baseline = "Plain"', 'baseline = "Plai"', "Evolving: baseline 'Plai' is no row; "),
        ("flags = [", "flags = [3, ", "row: 0: flags: 0 = 3: "),
        ("flags = [", 'flags = ["--run", "x", ', "Plain: flags: --run: use --runs"),
        ('"Toy"', '"Toy"\nsubset = "test9"', "Toy: subset 'test9': "),
    ],
)
def test_a_mistake_in_a_table_is_named(toy, before, after, message):
    path = toy / "tiny.toml"
    path.write_text(path.read_text().replace("paper = {", "#").replace(before, after, 1))
    with pytest.raises(UserError, match=re.escape(f"tiny.toml: {message}")):
        tables.read(str(path))


def test_two_recipes_of_one_name_would_share_their_runs(toy):
    (toy / "other").mkdir()
    other = shutil.copy(toy / "toy.toml", toy / "other")
    with (toy / "tiny.toml").open("a") as file:
        file.write(f'[[column]]\nrecipe = "{other}"\nlabel = "Other"\nmetric = "chrf"\n')
    with pytest.raises(UserError, match="recipe: 'toy' is there twice"):
        tables.read(str(toy / "tiny.toml"))


def test_a_table_of_tokens_for_raw_text(toy, monkeypatch):
    """A model of raw text gives no tokens to score."""
    monkeypatch.setattr(tables.Preparation, "at", lambda data: types.SimpleNamespace(tokenizer="none"))
    with pytest.raises(UserError, match=r"Toy: metric tokenised_bleu: needs tokens"):
        tables.read(str(toy / "tiny.toml"))


def test_a_row_without_flags_of_the_recipe(toy, capsys):
    """train.sh takes each --without itself; the page and the comparison with the recipe have no such flag."""
    path = toy / "tiny.toml"
    without = ["--without", "patience", "--without", "keep-last-epochs"]
    path.write_text(path.read_text().replace(json.dumps(TINY), json.dumps([*TINY, *without]), 1))
    pretend(toy, "Plain", patience=False, **{"keep-last-epochs": False, "without": False})
    assert re.search(r"\| Plain \| Toy \| 1 \| 10.00 .*\| toy \| abc \|", collect(toy))
    said = dry_run(toy, capsys, "--rows", "Plain", "--seeds", 2)
    assert f"{' '.join(without)} --seed 2 --run " in said.out


def test_flags_of_validation_and_of_the_batch_are_the_recipes(toy):
    """BLEU at validations changes nothing that is learnt; --update-freq may be a list."""
    recipe = toy / "toy.toml"
    recipe.write_text(f"eval-bleu = true\n{recipe.read_text()}")
    for given in ([], ["--update-freq", "2,4"], ["--max-tokens", "128"]):
        args, flags = train.parse([str(recipe), "transformer", *TINY, "--seed", "1", "--gpus", "0", *given])
        start = train.plan(recipes.read(args.recipe), args, flags, launch.Launch.of(args))
        trained = recipes.learning_flags({name: " ".join(values) for name, values in start.flags.items()})
        assert "eval-bleu" in start.flags
        assert recipes.differences(trained, recipes.flags_of(start.recipe, args.arch, flags)) == [], given
        assert trained[recipes.BATCH] == ("512,1024" if "2,4" in given else "256")
    one = {"max-tokens": "512", "update-freq": "4"}
    for of_processes in (one, {**one, "distributed-world-size": "2", "update-freq": "2"}):
        assert recipes.learning_flags(of_processes) == {recipes.BATCH: "2048"}


@pytest.mark.parametrize(("of_test", "p"), [(1.2, {1: 0.002}), (-1.2, {})])
def test_a_test_of_sacrebleu_says_nothing_of_a_score_that_differs_from_it(tmp_path, monkeypatch, of_test, p):
    monkeypatch.setattr(Records, "test_against", lambda *_: {"difference": of_test, "p": 0.002})
    one, other = (page.Entry("chrf", None, {1: {"scores": {"chrf": {"score": score}}}}) for score in (50.5, 50.0))
    one.compare(other, Records(tmp_path), None)
    assert (one.differences, one.p) == ({1: 0.5}, p)


def test_records_hold_no_path_and_no_date_of_this_machine(tmp_path, monkeypatch):
    """Else every --collect would change files under version control."""
    paths = {"run": f"{REPO}/runs/x", "command": f"{REPO}/scripts/evaluate.sh", "checkpoint": "/tmp/x/1.pt"}
    one = evaluation(**paths, averaged=["/tmp/x/1.pt", "/tmp/x/2.pt"])
    write_evaluation(tmp_path / "run", one, ["a"])
    made = []
    for when in (1e9, 2e9):
        monkeypatch.setattr(time, "time", lambda when=when: when)
        with opened(tmp_path / str(when)) as records:
            records.keep(tmp_path / "run", "toy/x", "test", one["settings_name"])
        made.append([path.read_bytes() for path in sorted((tmp_path / str(when)).rglob("*.*"))])
    assert made[0] == made[1]
    (row,) = Records(tmp_path / str(when)).rows.values()
    kept = [row[name] for name in ("run", "command", "checkpoint", "averaged")]
    assert kept == ["toy/x", "scripts/evaluate.sh", "1.pt", ["1.pt", "2.pt"]]


@pytest.mark.parametrize("name", [name for name in tables.names() if (REPO / "results" / f"{name}.md").exists()])
def test_the_published_results_are_what_the_records_say(name, tmp_path, monkeypatch):
    """Nothing in results/ is typed by hand: the records give every page again, word for word, and docs/results.md."""
    shutil.copytree(REPO / "results", tmp_path / "results")
    (tmp_path / "results" / f"{name}.md").unlink()
    shutil.copytree(REPO / "docs", tmp_path / "docs")
    monkeypatch.setattr(page, "pages", lambda folder: [tmp_path / "docs/results.md"])
    reproduce.main([name, "--collect", "--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "results")])
    for path in (f"results/{name}.md", "results/scores.jsonl", "docs/results.md"):
        assert (tmp_path / path).read_text() == (REPO / path).read_text()


def test_the_pages_show_what_the_records_say(tmp_path, monkeypatch):
    """Each table of speed and of scores stands in one page; and a page names the commits of its records."""
    marked = {name: [path for path in PAGES if f"<!-- {name} -->" in path.read_text()] for name in shown.TABLES}
    assert [name for name, paths in marked.items() if len(paths) != 1] == []
    for path in PAGES:
        (tmp_path / path.name).write_text(re.sub(r"(?s)(<!-- (\S.*) -->\n).*?(<!-- end)", r"\1\3", path.read_text()))
    monkeypatch.setattr(shown, "pages", lambda folder: [tmp_path / path.name for path in PAGES])
    shown.write(REPO / "results")
    for (path,) in marked.values():
        tables_of_results = r"(?s)<!-- multi30k.*?<!-- end"
        written, committed = (re.sub(tables_of_results, "", one.read_text()) for one in (tmp_path / path.name, path))
        assert written == committed


@pytest.mark.parametrize(
    ("name", "records"),
    [
        ("performance", ["training-[bl]*", "decoding", "growth"]),
        ("kernels", ["attention"]),
        ("production", ["exported*"]),
        ("results", ["training-conv"]),
    ],
)
def test_a_page_names_the_commits_of_its_records(name, records):
    files = [path for pattern in records for path in (REPO / "results/speed").glob(f"{pattern}.json")]
    commits = {json.loads(path.read_text())["commit"] for path in files}
    text = (REPO / f"docs/{name}.md").read_text()
    assert [commit for commit in commits if commit[:7] not in text] == []


def test_every_text_of_translations_was_scored():
    records = Records(REPO / "results")
    texts = [records.translations(row) for row in records.rows.values()]
    assert sum(text is not None for text in texts) >= 288
    assert all(
        digest(text) == row["hypotheses"] for text, row in zip(texts, records.rows.values(), strict=True) if text
    )
    logs = {row["log"] for row in records.rows.values() if "log" in row}
    assert logs == {path.name for path in (REPO / "results/logs").iterdir()}


def test_gpus_that_are_free(tmp_path, monkeypatch):
    smi = 'case $1 in *compute*) echo GPU-b;; *) for i in a b c d e; do echo "$i, GPU-$i"; done;; esac\n'
    fake_command(tmp_path, "nvidia-smi", smi, monkeypatch)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(launch, "gpus", lambda: (5, (9, 0)))

    def devices(size, at_once=None, on_cpu=False):
        args = types.SimpleNamespace(gpus_per_run=size, at_once=at_once)
        return [slot.get("CUDA_VISIBLE_DEVICES") for slot in reproduce.slots(args, on_cpu)]

    assert devices(None, 3) == [None] * 3
    assert devices(1) == ["a", "c", "d", "e"]
    assert devices(2, 2) == ["a,c", "d,e", "a,c", "d,e"]
    assert devices(None, None, on_cpu=True) == [""] * len(os.sched_getaffinity(0))
    with pytest.raises(UserError, match="--gpus-per-run 5: 4 GPUs are free"):
        devices(5)
    with pytest.raises(UserError, match="--gpus-per-run 2: the runs are on the CPU"):
        devices(2, on_cpu=True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "c, GPU-d,b")
    assert devices(1) == ["c", "d"]


@pytest.fixture
def instead(monkeypatch):
    """A function that lets other commands stand for those of a cell."""
    made = reproduce.cell_of

    def replace(commands):
        monkeypatch.setattr(reproduce, "check", lambda *_: None)
        monkeypatch.setattr(
            reproduce, "cell_of", lambda *words: dataclasses.replace(one := made(*words), commands=commands(one.label))
        )

    return replace


def test_runs_on_the_cpu(toy, monkeypatch, instead):
    """--at-once sets their number; each has one thread."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    script = 'cd "$0"; echo $OMP_NUM_THREADS "[$CUDA_VISIBLE_DEVICES]" >> said; touch "at-$1"; sleep 1; ls >> saw'
    instead(lambda label: [["sh", "-c", script, str(toy), label]])
    reproduce.main(options(toy, "--at-once", 2, "--rows", "Plain", "Evolving", "--gpus", 0))
    assert (toy / "said").read_text() == "1 []\n" * 2
    assert (toy / "saw").read_text().count("at-Plain") == 2, "each saw the other begin before it ended"


def test_a_cell_that_fails_is_not_scored_and_ends_with_a_status(toy, instead, capsys):
    """Its checkpoints may be those of the middle of a training. The others are run."""
    instead(lambda label: [["false" if label == "Plain" else "true"], ["touch", str(toy / f"scored-{label}")]])
    with pytest.raises(SystemExit) as end:
        reproduce.main(options(toy, "--gpus", 0))
    assert re.fullmatch(r"reproduce: these failed; run .*:\n  Plain, .*, seed 1", end.value.code)
    assert sorted(path.name for path in toy.glob("scored-*")) == ["scored-Evolving", "scored-Nobody"]
    assert "failed: Plain, " in capsys.readouterr().err


def test_a_command_that_cannot_be_started_is_named(toy, instead, capsys):
    """The cells behind it would wait for its place for ever."""
    instead(lambda label: [[str(toy / "none")]])
    check_refusal(capsys, reproduce.main, options(toy, "--at-once", 1, "--gpus", 0), [f"{toy}/none: "])


def test_a_run_does_not_outlive_its_command(toy):
    """Told to end, it ends the runs that it started, too."""
    code = "import dataclasses\nfrom ea_tools.tables import reproduce\n"
    code += "made, reproduce.check = reproduce.cell_of, lambda *_: None\n"
    code += f"commands = [['sh', '-c', 'echo $$ >> {toy}/pids; exec sleep 100']]\n"
    code += "reproduce.cell_of = lambda *words: dataclasses.replace(made(*words), commands=commands)\n"
    code += f"reproduce.main({options(toy, '--at-once', 2, '--gpus', 0)!r})"
    process = subprocess.Popen([sys.executable, "-c", code], env=ENVIRONMENT, stderr=subprocess.DEVNULL)
    pids = toy / "pids"
    while not pids.exists() or len(pids.read_text().split()) < 2:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=60)
    assert len(pids.read_text().split()) == 2, "the third is not begun"
    for pid in map(int, pids.read_text().split()):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@mistakes("""
    table7 | alpha
    table5 --rows huge | Transformer-Lite
    table5 --recipes sample | '--recipes sample: ' iwslt14-de-en
    table5 --seed 1 | --seeds
    table5 --gpu 0 | --gpu: gpus
    table5 --ea-kernel-size 5 | --ea-kernel-size:
    pages --gpus 0 | --gpus:
""")
def test_a_mistake_on_the_command_line_is_named(capsys, words, named):
    check_refusal(capsys, reproduce.main, [*words, "--dry-run"], named)


@pytest.mark.slow
def test_missing_cells_are_run_once(toy, run):
    table = tables.read(str(toy / "tiny.toml"))
    made = toy / "runs" / table.run(row_of(table, "Evolving"), table.columns[0].recipe, 1)
    shutil.copytree(run, made, ignore=shutil.ignore_patterns("average*", "eval"))  # what other tests added to it
    flags = options(toy, "--rows", "Plain", "Evolving", "--no-tensorboard", "--gpus", 0)
    first = script("reproduce.sh", *flags)
    assert first.returncode == 1, "one run was not made by train.sh, which says so"
    assert f">> {made}/reproduce.log" in first.stderr, "people can watch it there"
    assert "scripts/train.sh did not make" in (made / "reproduce.log").read_text()
    prepared = recipes.read(f"{toy}/toy.toml").data
    assert script("evaluate.sh", "--data", prepared, "--run", made, "--average", 2).returncode == 0
    second = script("reproduce.sh", *flags)
    assert second.returncode == 0, second.stderr[-3000:]
    assert second.stderr.count("done already") == 2, "one trained by the first call, one evaluated by hand"
    assert "train.sh" not in second.stderr
    written = (toy / "results" / "tiny.md").read_text()
    assert "Δ" in written
    assert written.count("not run |") == 1


def test_data_that_are_missing_are_one_error_with_the_command_that_makes_them(monkeypatch, tmp_path):
    """No page is written, which would say "not run" only. A status of 0 would tell a script that cells were run."""
    read = recipes.read
    missing = tmp_path / "multi30k-de-en"
    monkeypatch.setattr(recipes, "read", lambda name: read(name).model_copy(update={"data": missing}))
    folders = ["--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "results")]
    sweep_words = ["sample", "ea_transformer_lite", "--grid", "ea-alpha", "0", "0.1"]
    for main, words in ((reproduce.main, ["multi30k-laptop"]), (sweep.main, sweep_words)):
        with pytest.raises(SystemExit) as end:
            main([*words, "--seeds", "1", "2", *folders, "--gpus", "0"])
        assert end.value.code.count(f"{missing}/PREP.json") == 1
        assert "bash data-prep/multi30k.sh de-en" in end.value.code
        assert not (tmp_path / "results").exists()


def test_cells_without_their_data_fail_beside_others_that_are_done(toy, monkeypatch, capsys):
    monkeypatch.setattr(reproduce, "is_done", lambda cell, *_: cell.label != "Plain")
    write_recipe(toy / "toy.toml", toy / "nowhere")
    with pytest.raises(SystemExit, match=r"nowhere/PREP\.json"):
        reproduce.main(options(toy, "--gpus", 0))
    assert capsys.readouterr().err.count("done already") == 2
    assert (toy / "results" / "tiny.md").exists()
