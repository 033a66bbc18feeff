"""scripts/evaluate.sh: the numbers are sacreBLEU's, the order is the sentences', and nothing flatters."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from helpers.mistakes import check_refusal, fake_command, mistakes
from helpers.toy import save_model

from ea_artifacts.checkpoints import load
from ea_artifacts.command import UserError
from ea_artifacts.files import digest, read_json, read_lines
from ea_artifacts.preparation import Preparation
from ea_artifacts.run import Run
from ea_runtime.text import Text, words
from ea_tools import metrics
from ea_tools.training import average, provenance
from ea_tools.translating import evaluate

REFERENCES = [
    "The quick brown fox doesn't jump over the lazy dog.",
    "A man in a blue shirt is standing on a ladder, cleaning a window.",
    "“Two young, White males” are outside near many bushes.",
    "It costs $3.50 (about 3 €), he said.",
]
HYPOTHESES = [
    "the quick brown fox doesn't jump over a lazy dog.",
    "a man in a blue shirt is on a ladder cleaning a window.",
    "two young, white men are outside near the bushes.",
    "it costs $3.50 (about 3 €), he says.",
]
MOSES = words("moses", "en")


def tokens(lines):
    return [MOSES.tokenize(line) for line in lines]


def compute(tokenised, detokenised, references, tokenised_references, lowercase, **more):
    return metrics.compute(
        tokenised=tokenised, detokenised=detokenised, references=references,
        tokenised_references=tokenised_references, lowercase=lowercase, **more,
    )  # fmt: skip


def sacrebleu_cli(folder, hypotheses, references, *flags):
    """The score that sacreBLEU's own command line gives."""
    for name, lines in (("hyp", hypotheses), ("ref", references)):
        (folder / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    command = [Path(sys.executable).with_name("sacrebleu"), folder / "ref", "-i", folder / "hyp", "-w", "6", *flags]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def test_exact_match_counted_by_hand():
    """One of three lines of code is equal, one but for white space, one in case alone."""
    hypotheses = ["a = b ;", "return  x ;", "List < String > l ;"]
    references = ["a = b ;", "return x ;", "list < string > l ;"]
    scores = compute(hypotheses, hypotheses, references, references, lowercase=False, exact=True)
    assert scores["exact_match"]["score"] == pytest.approx(200 / 3)
    assert "exact_match" not in compute(hypotheses, hypotheses, references, references, lowercase=False)


@pytest.mark.parametrize("lowercase", [True, False])
def test_every_metric_equals_sacrebleus_command_line(tmp_path, lowercase):
    scores = compute(tokens(HYPOTHESES), HYPOTHESES, REFERENCES, tokens(REFERENCES), lowercase)
    case = ["-lc"] if lowercase else []
    raw, tokenised = (HYPOTHESES, REFERENCES), (tokens(HYPOTHESES), tokens(REFERENCES))
    for name, texts, flags in (
        ("sacrebleu", raw, case),
        ("tokenised_bleu", tokenised, [*case, "--tokenize", "none", "--force"]),
        ("chrf", raw, ["-m", "chrf", *(["--chrf-lowercase"] if lowercase else [])]),
    ):
        expected = sacrebleu_cli(tmp_path, *texts, *flags)
        assert scores[name]["score"] == pytest.approx(expected["score"], abs=1e-6)
        assert scores[name]["signature"] == expected["signature"]
    interval = sacrebleu_cli(tmp_path, *raw, *case, "--confidence")
    assert scores["sacrebleu"]["interval"]["half_width"] == pytest.approx(interval["confidence_var"], abs=1e-6)
    assert scores["sacrebleu"]["interval"]["signature"] == interval["signature"]


@pytest.mark.parametrize(("lowercase", "case"), [(True, ["-lc"]), (False, [])])
def test_the_paired_test_equals_sacrebleus_command_line(tmp_path, lowercase, case):
    worse = [line.replace("the", "a") for line in HYPOTHESES]
    (tmp_path / "worse").write_text("".join(f"{line}\n" for line in worse))
    test = metrics.compare(system=HYPOTHESES, baseline=worse, references=REFERENCES, lowercase=lowercase)["sacrebleu"]
    # The systems come after -i in their order, the first being the baseline; hyp is the one that sacrebleu_cli writes.
    flags = ["-i", tmp_path / "worse", tmp_path / "hyp", "--paired-bs", *case]
    before, after = (row["BLEU"] for row in sacrebleu_cli(tmp_path, HYPOTHESES, REFERENCES, *flags))
    assert test["difference"] == pytest.approx(after["score"] - before["score"], abs=1e-6)
    assert test["p"] == pytest.approx(after["p_value"], abs=1e-6)
    assert 0 < test["p"] < 1
    shouted = [line.upper() for line in HYPOTHESES]
    of_case = metrics.compare(system=shouted, baseline=HYPOTHESES, references=REFERENCES, lowercase=lowercase)
    assert (of_case["chrf"]["difference"] == 0) == lowercase
    same = metrics.compare(system=worse, baseline=list(worse), references=REFERENCES, lowercase=False)
    assert (same["identical"], same["sacrebleu"]["difference"], same["sacrebleu"]["p"]) == (True, 0, 1)


def settings(*flags):
    return evaluate.settings_name(evaluate.parse(["--data", "d", "--run", "r", *flags]))


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ("", "beam5.average10"),
        ("--beam 1 --average 3 --lenpen 1.2", "beam1.lenpen1.2.average3"),
        ("--best --tok char", "beam5.tok-char.best"),
        ("--checkpoint r/checkpoint3.pt:r/checkpoint2.pt", "beam5.checkpoint3+checkpoint2"),
        ("--checkpoint r/average10.pt", "beam5.file-average10"),  # any file may have such a name
        ("--precision bf16", "beam5.average10.bf16"),
        ("-- --cpu --batch-size 4", "beam5.average10"),
    ],
)
def test_results_are_named_by_their_settings(flags, name):
    assert settings(*flags.split()) == name


def test_other_checkpoints_and_flags_have_other_names():
    paths = ("r/checkpoint3.pt", "b/checkpoint3.pt", "c/checkpoint3.pt", "b/checkpoint3.pt:c/checkpoint3.pt")
    assert len({settings("--checkpoint", path) for path in paths}) == 4
    assert len({settings(), *(settings("--", "--max-len-b", number) for number in ("10", "20"))}) == 3


def test_against_needs_the_same_settings_and_references(tmp_path):
    other = tmp_path / "other" / "eval"
    other.mkdir(parents=True)
    for stem in ("test.beam1.average3", "test"):
        (other / f"{stem}.json").write_text(json.dumps({"references": digest(["a"]), "data": "x"}))
        (other / f"{stem}.hyp.txt").write_text("b\n")

    def read(*flags):
        args = evaluate.parse(["--data", "d", "--run", "r", "--against", str(other.parent), "--average", "3", *flags])
        return evaluate.read_baseline(args, "d", ["a"])

    assert read("--beam", "1") == read("--beam", "5", "--other-settings") == ["b"]
    with pytest.raises(UserError, match=r"beam5\.average3\.json .*test\.beam1\.average3"):
        read("--beam", "5")
    (other / "test.json").write_text(json.dumps({"references": digest(["c"]), "data": "x"}))
    with pytest.raises(UserError, match=r"--against .* test .* x$"):
        read("--beam", "5", "--other-settings")


def test_text_is_scored_by_the_tokeniser_of_its_language():
    systems = {"system": ["今天的天气很好,我们去公园玩。"], "baseline": ["今天天气很好。"]}
    references = ["今天的天气真好,我们去公园玩吧。"]
    scores = compute(None, systems["system"], references, references, False, tokenizer="zh")
    assert scores.keys() == {"sacrebleu", "chrf"}, "raw text has no tokens to score"
    test = metrics.compare(**systems, references=references, lowercase=False, tokenizer="zh")
    assert all("tok:zh|" in found["sacrebleu"]["signature"] for found in (scores, test))


def test_a_language_is_scored_alike_by_any_of_its_codes():
    for codes, tokeniser in {
        "zh zho chi cmn zho_Hans zho_Hant cmn_Hani yue_Hant": "zh",
        "ja jpn jpn_Jpan": "ja-mecab",
        "ko kor kor_Hang": "ko-mecab",
        "de deu deu_Latn zho_Latn th tha_Thai xx german": "13a",
    }.items():
        assert {metrics.tokenizer_for(code) for code in codes.split()} == {tokeniser}


def test_a_missing_package_of_a_tokeniser_is_named_with_its_installation(monkeypatch):
    for module in ("MeCab", "ipadic"):
        monkeypatch.setitem(sys.modules, module, None)
    for module in ("sacrebleu.tokenizers.tokenizer_ja_mecab", "sacrebleu.tokenizers"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(UserError, match=r"pip install 'sacrebleu\[ja\]==\d.* --tok char\)"):
        metrics.check_tokenizer("ja-mecab", "ja")


def test_a_tokeniser_that_does_not_suit_a_language_gives_a_warning(capsys):
    with pytest.raises(UserError, match=r"--tok moses: .*zh, 13a, "):
        metrics.check_tokenizer("moses", "de")
    for tokenizer, code, warning in (
        ("13a", "de", ""),
        ("char", "th", ""),
        ("13a", "tha_Thai", "use chrF"),
        ("13a", "german", "german: is not an ISO 639"),
    ):
        metrics.check_tokenizer(tokenizer, code)
        said = capsys.readouterr().err
        assert warning in said and bool(warning) == bool(said)


# As comet-score prints it: some lines of its own, then the file's name and the score of the system.
COMET = """
[ "$1 $3 $5" = "--sources --translations --references" ] || exit 9
[ "$MODEL_MISSING" ] && { echo "$8 is not a valid checkpoint path or model choice." >&2; exit 2; }
cat "$2" "$4" "$6" > "$COMET_CALLED.text"
shift 6
echo "$*" > "$COMET_CALLED"
echo 'Seed set to 1'
printf '%s\\tscore: 0.8765\\n' translations
"""


def test_comet_is_the_commands_score(tmp_path, monkeypatch):
    comet_score = tmp_path / "called"
    fake_command(tmp_path, "comet-score", COMET, monkeypatch)
    monkeypatch.setenv("COMET_CALLED", str(comet_score))
    result = metrics.comet("Unbabel/wmt22-comet-da", ["Hund"], ["a dog\rb"], ["the dog"], gpu=False)
    assert result["score"] == pytest.approx(87.65)
    assert result["signature"] == "model:Unbabel/wmt22-comet-da|times:100"
    assert comet_score.read_text().strip() == "--model Unbabel/wmt22-comet-da --gpus 0 --quiet --only_system"
    text = Path(f"{comet_score}.text").read_text().splitlines()
    assert text == ["Hund", "a dog b", "the dog"], "a carriage return would be the end of a line to COMET"
    monkeypatch.setenv("MODEL_MISSING", "1")
    with pytest.raises(UserError, match=r"--comet no/model: .* 2: no/model is not a valid"):
        metrics.comet("no/model", ["Hund"], ["a dog"], ["the dog"], gpu=False)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match=r"--comet .* comet-score.*pipx install unbabel-comet"):
        metrics.comet_command()


def test_what_a_benchmark_writes_is_no_local_change_and_what_code_says_is(monkeypatch, tmp_path):
    """Else every record after a run's first would say that it was made by other code than the commit's."""
    monkeypatch.setattr(provenance, "REPO", tmp_path)
    files = ("results/speed.json", "docs/curves.png", "README.md", "docs/speed.md", "scripts/code.py")
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("before")
    git = ("git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b")
    for text in (("init", "-q"), ("add", "."), ("commit", "-q", "-m", "all")):
        subprocess.run([*git, *text], check=True)
    clean = provenance.git_commit()
    assert re.fullmatch("[0-9a-f]{40}", clean)
    for name in files[:-1]:
        (tmp_path / name).write_text("after")
    assert provenance.git_commit() == clean
    (tmp_path / files[-1]).write_text("after")
    assert provenance.git_commit() == f"{clean} with local changes"
    (tmp_path / "copy").mkdir()
    monkeypatch.setattr(provenance, "REPO", tmp_path / "copy")
    assert provenance.git_commit() is None, "a copy that lies in somebody else's repository"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance.git_commit() is None, "without git"


def test_a_gpu_that_is_not_used_is_not_recorded(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Test")
    assert provenance.provenance()["device"] == "NVIDIA Test"
    assert provenance.provenance(on_cpu=True)["device"].startswith("CPU, ")


def test_validation_scores_subwords_of_raw_text():
    """fairseq's own BLEU at validations knows 13a alone, which finds no words in Thai or Chinese."""
    moses = metrics.validation_flags(SimpleNamespace(tokenizer="moses", bpe="subword_nmt"))
    assert (moses["eval-bleu-detok"], moses["eval-bleu-remove-bpe"]) == ("moses", "subword_nmt")
    raw = metrics.validation_flags(SimpleNamespace(tokenizer="none", bpe="sentencepiece"))
    assert raw["eval-tokenized-bleu"] is True
    assert not {"eval-bleu-detok", "eval-bleu-remove-bpe"} & raw.keys()


def test_compounds_are_split_on_both_sides():
    lines = ["ein Rinder-Steak - teuer", "ein Rinder @-@ Steak - teuer"]
    assert set(metrics.split_compounds(lines)) == {"ein Rinder ##AT##-##AT## Steak - teuer"}
    arguments = (["das Rinder-Filet ist gut ."], ["x"], ["x"], ["das Rinder-Steak ist gut ."], False)
    by_hand = compute(["das Rinder - Filet ist gut ."], ["x"], ["x"], ["das Rinder - Steak ist gut ."], False)
    assert compute(*arguments, compounds=True)["compound_split_bleu"] == by_hand["tokenised_bleu"]
    assert "compound_split_bleu" not in compute(*arguments)


def test_unk_earns_nothing():
    only = ["<unk> <unk> <unk> <unk> <unk>"]
    scores = compute(only, only, only, only, True)
    assert [scores[kind]["score"] for kind in ("sacrebleu", "tokenised_bleu")] == [0, 0]
    test = metrics.compare(system=only, baseline=["x"], references=only, lowercase=True)["sacrebleu"]
    assert (test["baseline"], test["difference"]) == (0, 0), "nor in a paired test"


def test_raw_references_must_be_the_binary_datas_text(capsys):
    data = SimpleNamespace(folder="x", lowercase=True)
    lines = [f"sentence {n} ." for n in range(20)]
    evaluate.check_references(lines, [line.title() for line in lines], data, "test")
    evaluate.check_references(["", *lines[1:]], ["a word that the dictionary lacks", *lines[1:]], data, "test")
    assert capsys.readouterr().err == ""
    evaluate.check_references(lines, ["Other .", *lines[1:]], data, "test")
    assert "1 of 20 raw references" in capsys.readouterr().err
    for raw, message in ((lines[1:] + lines[:1], "first line 1"), (lines[1:], "19 raw references, 20")):
        with pytest.raises(UserError, match=message):
            evaluate.check_references(lines, raw, data, "test")


@pytest.fixture
def half_way(data, tmp_path, monkeypatch):
    """A run of two epochs of four, whose translations are made up: the references, in the model's own words."""
    state = load(save_model(data, tmp_path / "model", "ea_transformer_base"))
    state["cfg"]["optimization"]["max_epoch"] = 4
    run = tmp_path / "run"
    run.mkdir()
    for epoch in (1, 2):
        state["extra_state"] = {"train_iterator": {"epoch": epoch + 1}}
        state["optimizer_history"][0]["num_updates"] = 10 * epoch
        torch.save(state, run / f"checkpoint{epoch}.pt")
    lines = tokens(line.lower() for line in read_lines(data / "raw/test.en"))
    monkeypatch.setattr(evaluate, "translate", lambda *_: (lines, {"seconds": 1.0}))
    return run


def score_run(data, run, *flags):
    return evaluate.evaluate(evaluate.parse([str(word) for word in ("--data", data, "--run", run, *flags)]))


def test_a_score_on_other_data_has_a_name_of_its_own(data, half_way, tmp_path):
    """It neither takes the place of the run's own score nor says that it is of the run's own data."""
    Preparation.at(data).keep(half_way)
    own = score_run(data, half_way, "--average", 2)
    law = Path(shutil.copytree(data, tmp_path / "law"))
    (law / "PREP.json").write_text(json.dumps({**read_json(data / "PREP.json"), "name": "law"}))
    other = score_run(law, half_way, "--average", 2)
    assert (own["data"], other["data"]) == (data.name, "law")
    assert own["scores"]["sacrebleu"]["score"] == pytest.approx(100)
    assert own["unfinished"] == "20 updates", "as is said of averages alone"
    for name, expected in (("test", own), ("law.test", other)):
        for stem in (name, f"{name}.beam5.average2"):
            assert json.loads((half_way / f"eval/{stem}.json").read_text()) == expected
            assert (half_way / f"eval/{stem}.hyp.txt").exists()
    assert score_run(law, half_way, "--average", 2, "--against", half_way)["against"]["identical"]
    assert score_run(data, half_way, "--checkpoint", half_way / "checkpoint1.pt")["unfinished"] is None


def test_empty_references_are_counted_with_a_warning(data, half_way, tmp_path, capsys, monkeypatch):
    """And a result of other data of the same name stays."""
    monkeypatch.setattr(evaluate, "check_references", lambda *_: None)
    holes = Path(shutil.copytree(data, tmp_path / "holes"))
    lines = read_lines(holes / "raw/test.en")
    (holes / "raw/test.en").write_text("".join(f"{line}\n\n" for line in lines[::2]))
    assert score_run(holes, half_way, "--average", 2)["empty_references"] == 5
    assert "warning: 5 references are empty" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"average2\.json: .*--name"):
        score_run(data, half_way, "--average", 2)


def test_a_score_that_is_made_again_keeps_comet(data, half_way, monkeypatch, capsys):
    comet = {"score": 80.0, "signature": "a model"}
    monkeypatch.setattr(metrics, "comet_command", lambda: None)
    monkeypatch.setattr(metrics, "comet", lambda *_: comet)
    score_run(data, half_way, "--average", 2)
    one = score_run(data, half_way, "--average", 2, "--against", half_way, "--comet", "a model")
    assert one["against"]["identical"]
    again = score_run(data, half_way, "--average", 2)
    assert again["scores"]["comet"] == comet
    assert "against" not in again, "the other run may have been evaluated anew"
    assert json.loads((half_way / "eval/test.json").read_text()) == again
    monkeypatch.setattr(metrics, "comet", Mock(side_effect=UserError("no such model")))
    (half_way / "eval/test.json").unlink()
    with pytest.raises(UserError, match="no such model"):
        score_run(data, half_way, "--average", 2, "--comet", "another model")
    kept = json.loads((half_way / "eval/test.json").read_text())
    assert kept["scores"] == again["scores"], "neither these scores are lost nor COMET's of before"
    monkeypatch.setattr(evaluate, "translate", lambda *_: (["something else"] * again["sentences"], None))
    other = score_run(data, half_way, "--average", 2, "--against", half_way)
    assert "comet" not in other["scores"]
    assert 0 <= other["against"]["sacrebleu"]["p"] <= 1
    assert f"against {half_way}: -" in capsys.readouterr().out


def test_a_score_does_not_change_which_checkpoint_is_the_model(data, half_way):
    before = Path(shutil.copyfile(half_way / "checkpoint2.pt", half_way / "checkpoint_last.pt"))
    assert score_run(data, half_way, "--average", 1)["checkpoint"] == str(half_way / "eval/average1.pt")
    assert Run(half_way).model() == before
    model = half_way / "average2.pt"
    average.main(["--inputs", str(half_way), "--num-epoch-checkpoints", "2", "--output", str(model)])
    assert score_run(data, half_way)["checkpoint"] == str(model), "by default the run's model is scored"
    assert (half_way / "eval/test.beam5.average2.json").exists()
    content = model.read_bytes()
    further = load(half_way / "checkpoint2.pt")  # the training went on
    further["model"] = {key: value + 1 for key, value in further["model"].items()}
    further["optimizer_history"][-1]["num_updates"] += 10
    torch.save(further, half_way / "checkpoint9.pt")
    assert score_run(data, half_way, "--average", 2)["checkpoint"] == str(half_way / "eval/average2.pt")
    assert Run(half_way).model() == model
    assert model.read_bytes() == content


def test_a_run_without_numbered_checkpoints_is_scored_by_its_best(data, half_way):
    for number, name in ((1, "best"), (2, "last")):
        (half_way / f"checkpoint{number}.pt").rename(half_way / f"checkpoint_{name}.pt")
    assert score_run(data, half_way)["checkpoint"] == str(half_way / "checkpoint_best.pt")
    assert (half_way / "eval/test.beam5.best.json").exists()


@pytest.mark.parametrize(
    ("language", "rule", "line", "of_valid", "of_test"),
    [
        ("fr", "normalise", "« été »…\u00ad ok", "&quot; été &quot; ... ok", "« été » … \u00ad ok"),
        ("en", "plain_apostrophes", "It’s here.", "It ’ s here .", "It &apos;s here ."),
    ],
)
def test_references_of_validation_from_the_training_text_are_like_it(
    data, tmp_path, language, rule, line, of_valid, of_test
):
    """Rules normalise training text alone, and make ’ plain in all other text. What people type gets both."""
    prep = {**read_json(data / "PREP.json"), "rules": {rule: True, "valid_every": 10}, "target_lang": language}
    (tmp_path / "PREP.json").write_text(json.dumps(prep))
    for split, tokens_of_split in (("valid", of_valid), ("test", of_test)):
        (tmp_path / f"{split}.{language}").write_text(f"{line}\n", encoding="utf-8")
        found = evaluate.references(tmp_path / f"{split}.{language}", Preparation.at(tmp_path))
        assert found == ([line], [tokens_of_split])
    shutil.copyfile(data / "code", tmp_path / "code")
    text = Text(tmp_path, language)
    assert text.join(text.subwords(line)) == (of_valid if rule == "normalise" else of_test).lower()


def test_every_model_of_an_ensemble_must_know_the_datas_words(data, half_way):
    one, two = half_way / "checkpoint1.pt", half_way / "checkpoint2.pt"
    assert score_run(data, half_way, "--checkpoint", f"{one}:{two}")["checkpoint"] == f"{one}:{two}"
    state = load(one)
    state["model"]["encoder.embed_tokens.weight"] = state["model"]["encoder.embed_tokens.weight"][:-1]
    torch.save(state, one)
    for paths in (f"{one}:{two}", f"{two}:{one}"):
        with pytest.raises(UserError, match=r"checkpoint1\.pt .*\d"):
            score_run(data, half_way, "--checkpoint", paths)


@pytest.mark.parametrize(
    ("updates", "limits", "unimproved", "stated"),
    [
        (300, {"max_update": 8000}, 0, "300 of 8,000 updates"),
        (8000, {"max_update": 8000}, 0, None),
        (300, {"max_update": 8000, "patience": 10}, 9, "300 of 8,000 updates"),
        (300, {"max_update": 8000, "patience": 10}, 10, None),
        (300, {"max_epoch": 4}, 0, None),
        (1300, {"max_epoch": 5}, 0, "1,300 updates"),
    ],
)
def test_a_score_states_how_far_an_unfinished_training_was(tmp_path, updates, limits, unimproved, stated):
    patience = {"patience": limits.pop("patience", -1)}
    state = {
        "cfg": {"optimization": {"max_update": 0, "max_epoch": 0, **limits}, "checkpoint": patience},
        "optimizer_history": [{"num_updates": updates}],
        "extra_state": {"train_iterator": {"epoch": 5}, "early_stopping": {"num_runs": unimproved}},
    }
    assert evaluate.unfinished(tmp_path, state) == stated
    assert evaluate.unfinished(tmp_path, {**state, "extra_state": {}}) is None
    (tmp_path / "checkpoint_last.pt").write_text("torn")
    assert evaluate.unfinished(tmp_path, state) == stated
    done = {**state, "model": {}, "cfg": {"optimization": {"max_update": 1, "max_epoch": 0}, "checkpoint": {}}}
    torch.save(done, tmp_path / "checkpoint_last.pt")  # the end was in the middle of an epoch
    assert evaluate.unfinished(tmp_path, state) is None


@pytest.mark.slow
def test_long_sentences_are_cut(data, run, tmp_path, capsys):
    """As translate.sh does; references that are too long keep no translation back."""
    state = load(run / "checkpoint3.pt")
    for name in ("max_source_positions", "max_target_positions"):
        setattr(state["cfg"]["model"], name, 12)
    torch.save(state, tmp_path / "checkpoint_best.pt")
    record = score_run(data, tmp_path, "--best", "--beam", 1, "--lenpen", 1.2, "--", "--max-len-b", 10)
    assert (record["beam"], record["lenpen"]) == (1, 1.2)
    assert record["cut"] > 0
    assert all(read_lines(tmp_path / "eval" / "test.hyp.txt"))
    assert "the rest of each was left out" in capsys.readouterr().out


@mistakes("""
    --average 10 | 'evaluate: ' '--checkpoint {run}/average10.pt'
    --average 11 | 'evaluate: ' '--average 3'
    --subset nope --average 1 | '--subset nope: ' 'test, valid'
    --checkpoint none.pt | 'none.pt: '
    --checkpoint {torn} | {torn}:
    --checkpoint {run}/checkpoint3.pt -- --nonsense | '-- --nonsense: '
    --against elsewhere | '--against elsewhere: '
    --lenpen nan | --lenpen: nan
    --run | 'evaluate.sh: error: ' --run 'evaluate.sh --help'
""")
def test_a_mistake_is_named_in_one_line(data, run, tmp_path, capsys, words, named):
    torn = tmp_path / "torn.pt"
    torn.write_bytes((run / "checkpoint3.pt").read_bytes()[:500])
    run = shutil.copytree(run, tmp_path / "run")
    (run / "average10.pt").touch()  # whose checkpoints were removed
    words = ["--data", data, "--run", run, *words]
    check_refusal(capsys, evaluate.main, words, named, writes_to=run, run=run, torn=torn)
