"""scripts/train.sh --dry-run: the flags are the papers', and the batch is theirs on any number of GPUs."""

import json
import os
import shlex
import socket
import subprocess

import pytest
import torch
from fairseq import options
from helpers import warm
from helpers.mistakes import check_refusal, fake_command, mistakes
from helpers.toy import ENVIRONMENT, TINY, done, tool

import ea_fairseq  # noqa: F401  (registers the architectures)
from ea_artifacts.checkpoints import load
from ea_artifacts.command import REPO, UserError, parse_flags
from ea_tools.tables import table
from ea_tools.training import flag_faults, launch, products, recipes, train

ARCHITECTURES = ["transformer_lite", "ea_transformer_lite", "transformer", "ea_transformer_base"]


@pytest.fixture(autouse=True)
def nothing_is_trained(monkeypatch):
    """train.sh becomes fairseq-train, and these tests with it."""
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("a training began"))


def dry_run(capsys, *arguments):
    train.main([*map(str, arguments), "--dry-run"])
    printed = capsys.readouterr()
    return shlex.split(printed.out), printed.err


def flags(command):
    return {name: " ".join(values) for name, values in parse_flags(command[command.index("--user-dir") :]).items()}


@pytest.mark.parametrize("recipe", recipes.names())
def test_fairseq_takes_every_recipe(capsys, recipe):
    arch = "ea_cmlm_transformer" if "cmlm" in recipe else ARCHITECTURES[recipes.names().index(recipe) % 4]
    command, _ = dry_run(capsys, recipe, arch, "--gpus", 1)
    script = next(i for i, word in enumerate(command) if word.endswith("fairseq_train.py"))
    args = options.parse_args_and_arch(options.get_training_parser(), command[script + 1 :])
    assert args.arch == arch
    alpha = 0.1 if recipe.startswith(("multi30k-tiny", "multi30k-cmlm")) else 0.5
    alphas = {"ea_transformer_lite": 0.1, "ea_transformer_base": alpha, "ea_cmlm_transformer": alpha}
    assert getattr(args, "ea_alpha", None) == alphas.get(arch)
    separate = recipe.startswith("iwslt14") and not recipe.endswith("rdrop")  # whose authors' dictionary is joint
    assert (args.share_all_embeddings, args.share_decoder_input_output_embed) == (not separate, separate)
    assert args.tensorboard_logdir.endswith("/tensorboard")
    # Its architectures are not looked at when it is read, so that reading it never imports fairseq.
    assert recipes.read(recipe).arch.keys() <= flag_faults.ours()


#: ICML 2021, appendix A.3 and table 10
PAPER = (
    "optimizer adam|adam-betas (0.9, 0.98)|lr-scheduler inverse_sqrt|lr 0.001|warmup-updates 4000|patience 5|"
    "criterion label_smoothed_cross_entropy|label-smoothing 0.1|keep-last-epochs 10|"
)
#: Wu et al. 2021: the published command and the defaults of its code, on one process as on two GPUs
TINY_RECIPE = (
    "encoder-layers 4|encoder-embed-dim 128|encoder-ffn-embed-dim 256|encoder-attention-heads 4|"
    "decoder-layers 4|decoder-embed-dim 128|decoder-ffn-embed-dim 256|decoder-attention-heads 4|share-all-embeddings |"
    "optimizer adam|adam-betas (0.9, 0.98)|lr-scheduler inverse_sqrt|lr 0.005|warmup-updates 2000|warmup-init-lr 1e-07|"
    "dropout 0.3|label-smoothing 0.1|clip-norm 25|max-update 8000|patience 10|keep-last-epochs 10|max-tokens 4096|"
)


#: one of two machines without GPUs, which train over gloo
GLOO = (
    "distributed-backend gloo|distributed-rank 1|distributed-world-size 2|distributed-no-spawn |cpu |"
    "distributed-init-method tcp://10.0.0.1:29500|update-freq 64"
)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("iwslt14-de-en transformer_lite --gpus 1", f"{PAPER}dropout 0.2"),
        ("wmt14-en-de ea_transformer_base --gpus 1", f"{PAPER}dropout 0.3|ea-alpha 0.5|ea-beta 0.1"),
        ("wmt14-en-fr ea_transformer_lite --gpus 1", f"{PAPER}dropout 0.1|ea-alpha 0.1|ea-beta 0.1"),
        ("multi30k-tiny-en-de ea_transformer_base --gpus 0", f"{TINY_RECIPE}update-freq 2|ea-alpha 0.1|ea-beta 0.1"),
        ("wmt14-en-de ea_transformer_lite --gpus 0 --nodes 2 --node-rank 1 --master 10.0.0.1", GLOO),
    ],
)
def test_the_flags_of_fairseq_train(capsys, words, expected):
    planned = flags(dry_run(capsys, *words.split())[0])
    assert dict(pair.split(" ", 1) for pair in expected.split("|")).items() <= planned.items()
    assert ("ea_" in words) == any(name.startswith("ea-") for name in planned)


@pytest.mark.parametrize(
    ("recipe", "gpus"), [("iwslt14-de-en", 0), ("multi30k-tiny-en-de", 2), ("wmt14-en-de", 4), ("wmt14-en-fr", 16)]
)
def test_the_effective_batch_is_the_same_on_any_number_of_gpus(capsys, recipe, gpus):
    command, said = dry_run(capsys, recipe, "ea_transformer_lite", "--gpus", gpus)
    planned = flags(command)
    batch = max(gpus, 1) * int(planned["max-tokens"]) * int(planned["update-freq"])
    assert batch == recipes.read(recipe).batch.total
    if recipe.startswith("wmt"):
        assert batch == 8 * 16 * 4096
        assert int(planned["max-tokens"]) == 4096
    assert f"{batch:,} tokens an update" in said
    assert ("cpu" in planned) == (gpus == 0)
    assert planned["distributed-world-size"] == str(max(gpus, 1))


def test_smaller_steps_are_made_up_for(capsys):
    planned = flags(dry_run(capsys, "wmt14-en-de", "ea_transformer_base", "--gpus", 4, "--max-tokens", 2048)[0])
    assert (planned["update-freq"], planned["max-tokens-valid"]) == ("64", "4096")
    command, said = dry_run(capsys, "sample", "transformer_lite", "--gpus", 0, "--update-freq", "2,4")
    assert flags(command)["update-freq"] == "2,4", "fairseq's list for the first epochs"
    assert f"effective batch: {2 * int(flags(command)['max-tokens']):,} tokens an update by --update-freq" in said


def test_torchrun_starts_the_processes_of_two_machines(capsys):
    """2 machines with 8 GPUs each: torchrun on both, and half the accumulation of the paper's 8."""
    where = ["--nodes", 2, "--node-rank", 1, "--master", "one.example:4000", "--gpus", 8]
    command, _ = dry_run(capsys, "wmt14-en-de", "ea_transformer_base", *where)
    expected = "--nnodes 2 --node-rank 1 --nproc-per-node 8 --master-addr one.example --master-port 4000"
    assert command[1].startswith("PYTHONPATH="), "it can be given elsewhere"
    assert command[2].endswith("torchrun")
    assert expected in shlex.join(command)
    assert {"update-freq": "8", "distributed-world-size": "16"}.items() <= flags(command).items()


def test_slurms_variables_place_the_processes(capsys, monkeypatch, tmp_path):
    def planned(*words):
        command, _ = dry_run(capsys, "wmt14-en-de", "ea_transformer_lite", "--gpus", 8, *words)
        return shlex.join(command)

    fake_command(tmp_path, "scontrol", "echo node7\necho node8\n", monkeypatch)
    for name, value in {"NNODES": "2", "NODEID": "1", "JOB_NODELIST": "node[7-8]"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert "--node-rank 1 --nproc-per-node 8 --master-addr node7" in planned()
    own = planned("--node-rank", 0, "--master", "one:65535")
    assert "--node-rank 0 --nproc-per-node 8 --master-addr one --master-port 65535" in own
    *_, environment = launch.distribution(launch.Launch(gpus=0))
    assert environment["SLURM_NODEID"] == "1"
    assert "SLURM_JOB_NODELIST" not in environment, "fairseq would look for the other processes by itself"
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "")  # in a container, without scontrol
        with pytest.raises(SystemExit, match=r"--master HOST.*--nodes 1"):
            planned()
    monkeypatch.delenv("SLURM_NODEID")  # outside of srun
    with pytest.raises(SystemExit, match=r"--node-rank .*--nodes 1"):
        planned()
    planned("--nodes", 1)
    monkeypatch.setenv("SLURM_NNODES", "abc")
    with pytest.raises(SystemExit):
        planned()
    assert "--nodes: invalid" in capsys.readouterr().err


def test_launch_ignores_WORLD_SIZE_and_SLURM(monkeypatch):
    """fairseq would train with one process on the first of eight GPUs, or take one port for all trainings of a job."""
    told = {"MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK"}
    for name in (*told, "SLURM_JOB_ID", "SLURM_ARRAY_TASK_ID", "OTHER"):
        monkeypatch.setenv(name, "7")
    *_, environment = launch.distribution(launch.Launch(gpus=0))
    assert environment["OTHER"] == "7"
    assert not {*told, "SLURM_JOB_ID", "SLURM_ARRAY_TASK_ID"} & environment.keys()
    *_, environment = launch.distribution(launch.Launch(gpus=0, nodes=2, host="h", port=1))
    assert not told & environment.keys()


@pytest.mark.parametrize(("mine", "given"), [(None, "0,1"), ("GPU-a,GPU-b,GPU-c", "GPU-a,GPU-b")])
def test_fewer_gpus_are_the_first_of_those_that_are_ours(monkeypatch, mine, given):
    """fairseq starts a process for each that it sees; another user may have the others."""
    monkeypatch.setattr(launch, "gpus", lambda: (3, (9, 0)))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if mine is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mine)
    for number, expected in ((2, given), (3, mine)):
        *_, environment = launch.distribution(launch.Launch(gpus=number))
        assert environment.get("CUDA_VISIBLE_DEVICES") == expected


@pytest.mark.parametrize(
    ("capability", "expected"), [((9, 0), "bf16"), ((8, 0), "bf16"), ((7, 5), "fp16"), ((6, 1), "fp32"), (None, "fp32")]
)
def test_precision_follows_the_gpu(monkeypatch, capability, expected):
    monkeypatch.setattr(products, "has_bf16_units", lambda: True)
    gpu, cpu = launch.Launch(gpus=1, capability=capability), launch.Launch(gpus=0)
    chosen = [launch.choose_precision(*one) for one in (("auto", gpu), ("auto", cpu), ("fp32", gpu), ("fp16", gpu))]
    assert chosen == [expected, "fp32", "fp32", "fp16"]


def test_fairseqs_own_flag_of_precision_is_the_only_one(capsys, monkeypatch, flag="memory-efficient-bf16"):
    """fairseq takes --bf16 beside --fp16 for a mistake about TPUs."""
    monkeypatch.setattr(launch, "gpus", lambda: (1, (9, 0)))
    planned = flags(dry_run(capsys, "sample", "ea_transformer_lite", f"--{flag}")[0])
    assert planned.keys() & set(recipes.PRECISIONS) == {flag}
    with pytest.raises(SystemExit, match=f"--precision bf16 .*--{flag}: "):
        dry_run(capsys, "sample", "ea_transformer_lite", "--precision", "bf16", f"--{flag}")


def test_units_for_bfloat16_are_found(tmp_path):
    for line, has_units in {
        "flags\t\t: fpu avx512f avx512_bf16 sse": True,
        "Features : fp asimd bf16": True,
        "flags : fpu avx2 avx512f avx512_vnni": False,
    }.items():
        (tmp_path / "cpuinfo").write_text(f"processor : 0\n{line}\nbugs : none\n")
        assert products.has_bf16_units(tmp_path / "cpuinfo") == has_units


def test_bfloat16_on_a_cpu_is_that_of_products_alone(capsys, monkeypatch):
    """fairseq's own --bf16 would make the whole model half precise; float32 is what our kernel knows."""
    monkeypatch.setattr(products, "has_bf16_units", lambda: True)
    command, said = dry_run(capsys, "sample", "ea_transformer_lite", "--gpus", 0, "--precision", "bf16")
    script = next(i for i, word in enumerate(command) if word.endswith("fairseq_train.py"))
    assert command[script + 1] == "--bf16-products"
    assert "bf16" not in flags(command)
    command, said = dry_run(capsys, "sample", "ea_transformer_lite", "--gpus", 0)
    assert "--bf16-products" not in command
    assert "precision: fp32; this CPU has units for bfloat16, try --precision bf16" in said


def test_the_command_line_wins(capsys, tmp_path):
    mark = "\ufeff"  # as some editors write it
    recipe = 'inherit = "iwslt14-de-en"\n[flags]\nlr = 1\nlog-interval = 5'
    (tmp_path / "mine.toml").write_text(mark + recipe, encoding="utf-8")
    extra = "--lr 5e-4 --seed=7 --encoder-layers 2 --without share-decoder-input-output-embed"
    planned = flags(dry_run(capsys, tmp_path / "mine.toml", "ea_transformer_lite", *extra.split())[0])
    chosen = {"lr": "5e-4", "seed": "7", "encoder-layers": "2", "log-interval": "5"}
    assert chosen.items() <= planned.items()
    assert "share-decoder-input-output-embed" not in planned


@pytest.mark.parametrize(
    ("pairs", "tokens", "update_freq", "dropout"),
    [(1_000, "1000", "1", "0.3"), (160_239, "4096", "1", "0.2"), (4_000_000, "4096", "16", "0.1")],
)
def test_own_data_need_no_recipe(capsys, tmp_path, monkeypatch, pairs, tokens, update_freq, dropout):
    """The recipe is made by the size of the corpus, and printed as TOML that gives the same command as a file."""
    prep = {"source_lang": "et", "target_lang": "en", "tokenizer": "moses", "lowercase": False, "bpe": "subword_nmt"}
    data = tmp_path / "a 😀" / "mine.v2"
    data.mkdir(parents=True)
    (data / "PREP.json").write_text(json.dumps({**prep, "splits": {"train": {"pairs": pairs}}}))
    command, said = dry_run(capsys, "--data", data, "ea_transformer_lite", "--gpus", 0, "--lr", "5e-4")
    planned = flags(command)
    expected = {"max-tokens": tokens, "update-freq": update_freq, "dropout": dropout, "lr": "5e-4", "ea-alpha": "0.1"}
    assert expected.items() <= planned.items()
    assert planned["save-dir"].endswith("runs/mine.v2-ea_transformer_lite")
    assert (planned["source-lang"], planned["target-lang"]) == ("et", "en")
    toml = said[said.index("# For a corpus") :]
    assert ("eval-bleu = true" in toml) == ("eval-bleu-print-samples" in planned) == (pairs <= 50_000)
    (tmp_path / "mine.v2.toml").write_text(toml)
    again, _ = dry_run(capsys, tmp_path / "mine.v2.toml", "ea_transformer_lite", "--gpus", 0, "--lr", "5e-4")
    assert again == command
    monkeypatch.chdir(tmp_path)
    given = ["--data", data.relative_to(tmp_path)]  # the run is used from any folder
    after, _ = dry_run(capsys, "ea_transformer_lite", "--lr", "5e-4", *given, "--gpus", 0)
    assert after == command


@mistakes("""
    multi30k-de-en | PREP.json 'data-prep/multi30k.sh de-en'
    wmt14-en-de | PREP.json data-prep/wmt14-en-de.sh
    sample | PREP.json data-prep/sample.sh
""")
def test_the_command_that_makes_a_recipes_data_is_named(capsys, tmp_path, monkeypatch, words, named):
    monkeypatch.setattr(recipes, "REPO", tmp_path)
    check_refusal(capsys, train.main, [*words, "transformer_lite", "--gpus", "0"], named, writes_to=tmp_path)


@mistakes(r"""
    mutli30k-de-en transformer | 'mutli30k-de-en' multi30k-de-en
    sample transformer -- --clip-norm 1 | 'error: --:'
    sample | RECIPE ARCH
    sample ea_transformer_lit | 'ARCH ea_transformer_lit:' ea_transformer_lite
    sample ea_transformer_lm_base | 'ARCH ea_transformer_lm_base:' translate
    sample transformer --source-lang en | --source-lang RECIPE
    sample transformer --best-checkpoint-metric accuracy | '--best-checkpoint-metric accuracy: add --maximize-best-'
    sample transformer --maximize-best-checkpoint-metric | 'loss: leave out --maximize-best-checkpoint-metric'
    sample transformer --target-l fr | --target-l:
    sample ea_transformer_lite --ea-rule predictive --ea-beta 0.3 | '--ea-beta 0.3:'
    sample transformer --lr-scheduler polynomial_decay | --total-num-update:
    sample transformer --data a${x} | '--data a${x}: ${'
    sample ea_transformer_lite --ea-alfa 0 | --ea-alfa: --ea-alpha
    sample transformer --gpu 1 | --gpu: --gpus
    sample transformer --gpus x | '--gpus: ' 'train.sh --help'
    sample transformer --lr abc | '--lr: ' 'abc'
    sample transformer --lr -1 | '--lr -1'
    sample transformer --encoder-layers -1 | '--encoder-layers -1:'
    sample transformer --update-freq --fp16 | '--update-freq :'
    sample transformer -s de | -s: --source-lang
    wmt14-en-de transformer --gpus 3 | '3 GPU x 4,096'
    sample transformer --amp | '--amp: ' GPU
    sample transformer --precision fp16 | '--precision fp16: ' GPU
    sample transformer --precision bf16 | '--precision bf16: '
    sample transformer --nodes 2 | --node-rank --master
    sample transformer --node-rank 1 | --node-rank --nodes
    sample transformer --nodes 2 --node-rank 0 --master a:b | --master: a:b
    sample transformer --without nonsense | '--without nonsense: '
    sample transformer --optimizer sgd --adam-betas 1 | --adam-betas:
""")
def test_a_mistake_is_named_and_leaves_nothing_behind(capsys, tmp_path, monkeypatch, words, named):
    monkeypatch.setattr(products, "has_bf16_units", lambda: False)
    cpu = [] if "--gpus" in words else ["--gpus", "0"]
    main = lambda words: train.main([*words, *cpu, "--run", str(tmp_path / "run"), "--dry-run"])  # noqa: E731
    check_refusal(capsys, main, words, named, writes_to=tmp_path)


@mistakes("""
    sample transformer_lite --finetune-from-model nope.pt | '--finetune-from-model nope.pt: '
    sample transformer_lite --finetune-from-model {README} | '--finetune-from-model {README}: '
    sample ea_transformer_base {tiny} --ea-alpha 0.9 --finetune-from-model {evolving} | {evolving}: '--ea-alpha is 0.9'
    sample transformer {tiny} --finetune-from-model {evolving} | '--finetune-from-model {evolving}: --ea-alpha is 0.0'
    multi30k-en-fr transformer_lite | de-en multi30k-en-fr en-fr
    sample transformer_lite --run {thesis} | {thesis} thesis.tex
    sample transformer_lite --run a${x} | '--run a${x}: ${'
""")
def test_data_a_first_model_or_a_folder_that_do_not_suit_are_named(capsys, tmp_path, data, checkpoints, words, named):
    tiny = [*TINY, "--without", "encoder-normalize-before", "--without", "decoder-normalize-before"]
    words = [part for word in words for part in (tiny if word == "{tiny}" else [word])]
    (tmp_path / "thesis").mkdir()
    for name in ("nohup.out", "thesis.tex"):  # of which a shell's log may be there before a run
        (tmp_path / "thesis" / name).touch()
    places = {"README": REPO / "README.md", "evolving": checkpoints.evolving, "thesis": tmp_path / "thesis"}
    run = [] if "--run" in words else ["--run", str(tmp_path / "run")]
    words = [*words, "--data", str(data), "--gpus", "0", *run]
    check_refusal(capsys, train.main, words, named, writes_to=tmp_path, **places)


def test_an_unknown_architecture_is_named_before_all_else(capsys):
    with pytest.raises(SystemExit, match="ARCH ea_transformer_lit:"):
        train.main(["sample", "ea_transformer_lit", "--gpus", "0", "--dry-run"])
    assert capsys.readouterr() == ("", "")


def test_gpus_that_are_not_there_are_refused(monkeypatch):
    monkeypatch.setattr(launch, "gpus", lambda: (1, (9, 0)))
    assert launch.Launch.of(train.parse(["sample", "transformer"])[0]) == launch.Launch(1, (9, 0))
    with pytest.raises(UserError, match=r"--gpus 2: .* 1"):
        launch.Launch.of(train.parse(["sample", "transformer", "--gpus", "2"])[0])


@mistakes(r"""
    'inherit = "smaple"' | "inherit = 'smaple':" sample
    'batch =' | mine.toml:
    'inherit = "sample"\nbatch = 5' | 'mine.toml: batch = 5:'
    'inherit = "sample"\n[batch]\ntokens = "1000"' | "mine.toml: batch: tokens = '1000':"
    'inherit = "base"\ndata = "data/x"' | mine.toml: source-lang
    'inherit = "sample"\ndropout = 0.4' | 'mine.toml: dropout:' flags
    'inherit = "sample"\n[arch.ea_transformer_lit]\nlr = 1' | mine.toml: arch.ea_transformer_lit: ea_transformer_lite
    'inherit = "sample"\n[flags]\nlabel-smothing = 0.1' | --label-smothing: --label-smoothing
    'inherit = "sample"\n[arch.transformer_lite]\nfp16 = true' | --fp16: mine --precision
""")
def test_a_mistake_in_a_recipe_of_ones_own_is_one_line(capsys, tmp_path, words, named):
    path = tmp_path / "mine.toml"
    path.write_text(words[0].replace(r"\n", "\n"))
    words = [path, "transformer_lite", "--gpus", "0", "--dry-run"]
    check_refusal(capsys, train.main, words, named, writes_to=tmp_path)


@pytest.mark.parametrize(
    ("words", "left_out"),
    [
        (["--optimizer", "adafactor"], {"adam-betas"}),
        (["--criterion", "adaptive_loss"], {"label-smoothing"}),
        (["--task", "multilingual_translation", "--lang-pairs", "de-en"], {"eval-bleu", "eval-bleu-print-samples"}),
        (["--ea-rule", "predictive"], {"ea-beta"}),
    ],
    ids=lambda value: value[1] if isinstance(value, list) else None,
)
def test_what_a_chosen_part_does_not_take_is_left_out_of_the_recipe(capsys, data, words, left_out):
    where = ["sample", "ea_transformer_lite", "--data", data, "--gpus", 0]
    before = flags(dry_run(capsys, *where)[0])
    command, said = dry_run(capsys, *where, *words)
    assert left_out <= before.keys() - flags(command).keys()
    assert flags(command)["ea-alpha"] == "0.1"
    options.parse_args_and_arch(options.get_training_parser(), command[command.index("--user-dir") - 1 :])
    assert all(f"--{name}" in said.partition("note: left out of the recipe")[2] for name in left_out)


def test_no_row_of_our_tables_has_a_flag_without_effect(capsys):
    tables = map(table.read, table.names())
    rows = {(row.arch, *row.flags): one.recipes[0] for one in tables for row in one.rows}
    for words, recipe in rows.items():
        if any(word.startswith("--ea-") for word in words):
            dry_run(capsys, recipe, *words)


@pytest.mark.parametrize(("recipe", "small"), [("multi30k-de-en", True), ("iwslt14-de-en", False)])
def test_small_recipes_score_and_show_translations_at_validation(capsys, data, recipe, small):
    """The published tables have other protocols: there the loss decides which checkpoint is the best."""
    words = [recipe, "transformer_lite", "--gpus", 1, "--data", data]
    planned = flags(dry_run(capsys, *words)[0])
    assert ("eval-bleu" in planned) == ("eval-bleu-print-samples" in planned) == small
    assert "best-checkpoint-metric" not in planned
    assert flags(dry_run(capsys, *words, "--eval-bleu")[0])["best-checkpoint-metric"] == "bleu"
    assert not small or "eval-bleu" not in flags(dry_run(capsys, *words, "--without", "eval-bleu")[0])


@pytest.mark.slow
def test_two_machines_train_as_one_with_twice_the_accumulation(data, tmp_path):
    """Two processes stand for them, one for each."""
    flags = [*TINY, "--data", data, "--max-tokens", 256, "--max-epoch", 2]
    flags += ["--num-workers", 0, "--gpus", 0, "--dropout", 0, "--no-tensorboard"]
    flags += ["--eval-bleu-args", '{"beam": 1, "max_len_b": 5}']
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        master = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [*tool("training.train"), "sample", "ea_transformer_lite", *flags, "--update-freq", 1]
    command += ["--run", tmp_path / "two", "--nodes", 2, "--master", master, "--node-rank"]
    options = {"env": ENVIRONMENT, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    ranks = [warm.Popen([*map(str, command), rank], **options) for rank in "01"]
    try:
        said = [rank.communicate(timeout=200)[1] for rank in ranks]
    finally:  # one would wait for the other, where that has failed
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert "effective batch: 512 tokens" in said[0]
    done("training.train", "sample", "ea_transformer_lite", *flags, "--update-freq", 2, "--run", tmp_path / "one")
    two, one = (load(tmp_path / name / "checkpoint_last.pt") for name in ("two", "one"))
    assert two["optimizer_history"][-1]["num_updates"] == one["optimizer_history"][-1]["num_updates"] > 4
    assert two["cfg"]["distributed_training"]["distributed_world_size"] == 2
    for key, weight in one["model"].items():
        torch.testing.assert_close(two["model"][key], weight, rtol=1e-4, atol=1e-5, msg=key)
    # One log, one writer: the second machine keeps quiet.
    assert (tmp_path / "two" / "train.log").read_text().count("| valid | epoch 002") == 1
