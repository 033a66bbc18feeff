"""Our models pass the checks of fairseq's own tests: data, generation and training in many ways.

Everything runs in this process, through fairseq's own entry points.
"""

import math

import pytest
import torch
from helpers.models import TINY, TRAINING
from helpers.other_models import run
from helpers.toy import fairseq

pytestmark = pytest.mark.slow

ARCH = ["--arch", "ea_transformer_base", *TINY, "--ea-beta", "0.3"]
LONGEST = 10  # the corpus's longest sentences, with their ends


def trained(data, folder, *flags, arch=ARCH, updates=4):
    words = [*arch, *TRAINING, "--save-dir", folder, "--max-update", updates, "--no-epoch-checkpoints", *flags]
    run("train", data, *words)
    return folder / "checkpoint_last.pt"


def generated(data, checkpoint, *flags, program="generate"):
    """The printed text. Models that are hardly trained do not find an end, which takes long."""
    words = ["--path", checkpoint, "--required-batch-size-multiple", 1, "--batch-size", 8, "--max-len-b", 15, *flags]
    return run(program, data, *words)


def hypotheses(printed):
    """{sentence: [text of each hypothesis]}"""
    found = {}
    for line in printed.splitlines():
        if line.startswith("H-"):
            number, _, text = line.split("\t")
            found.setdefault(int(number[2:]), []).append(text)
    return found


def sentences(printed, kind):
    """{number: text} of the sources (S) or the references (T)"""
    fields = [line.split("\t") for line in printed.splitlines() if line.startswith(f"{kind}-")]
    return {int(name[2:]): text for name, text in fields}


@pytest.fixture(scope="module")
def checkpoint(corpus, tmp_path_factory):
    return trained(corpus, tmp_path_factory.mktemp("ways"), updates=60)


@pytest.mark.parametrize("implementation", ["raw", "lazy", "mmap"])  # fairseq's "cached" trains no model at all
def test_every_kind_of_binary_data(corpus, tmp_path, implementation):
    data = corpus
    if implementation != "mmap":
        data = tmp_path / "data"
        kind = ["--dataset-impl", implementation]
        texts = [word for split in ("train", "valid", "test") for word in (f"--{split}pref", corpus.parent / split)]
        fairseq("preprocess", "-s", "de", "-t", "en", *texts, "--destdir", data, "--joined-dictionary", *kind)
    assert trained(data, tmp_path / "run", "--dataset-impl", implementation).exists()
    printed = generated(data, tmp_path / "run" / "checkpoint_last.pt", "--dataset-impl", implementation, "--beam", 2)
    assert len(hypotheses(printed)) == 10


# Not --diverse-beam-groups: this fairseq looks its groups up by the sentence's number in the corpus, out of bounds.
@pytest.mark.parametrize(
    "flags, holds",
    [
        ("--sampling --temperature 2 --beam 2 --nbest 2 --seed 3", None),
        ("--sampling --sampling-topp 0.2 --beam 2 --nbest 2", None),
        ("--diversity-rate 0.5 --beam 6 --nbest 2", None),
        ("--prefix-size 2 --beam 3 --nbest 2", lambda words, source, target: words[:2] == target[:2]),
        ("--match-source-len --beam 2 --nbest 2", lambda words, source, target: len(words) <= LONGEST),
        (
            "--lenpen 0.6 --unkpen 0.5 --min-len 3 --max-len-b 7 --beam 2 --nbest 2",
            lambda words, source, target: 3 <= len(words) <= 7,
        ),
        ("--print-alignment --beam 2 --nbest 2", None),
        ("--score-reference", lambda words, source, target: words == target),
    ],
)
def test_generation(corpus, checkpoint, flags, holds):
    printed = generated(corpus, checkpoint, *flags.split())
    sources, targets, found = sentences(printed, "S"), sentences(printed, "T"), hypotheses(printed)
    assert len(found) == 10
    for number, texts in found.items():
        assert len(texts) == (2 if "nbest" in flags else 1)
        for text in texts if holds else []:
            assert holds(text.split(), sources[number].split(), targets[number].split()), (number, text)


def test_retained_dropout_makes_translations_vary(corpus, checkpoint):
    flags = ["--retain-dropout", "--beam", 1, "--sampling", "--sampling-topk", 1]
    torch.manual_seed(1)
    first = generated(corpus, checkpoint, *flags, "--seed", 1)
    assert generated(corpus, checkpoint, *flags, "--seed", 2) != first


def test_interactive(corpus, checkpoint, tmp_path):
    (tmp_path / "input").write_text("w1 w2 w3\nw4\n")
    flags = ["--input", tmp_path / "input", "--buffer-size", 8, "--beam", 2]
    assert len(hypotheses(generated(corpus, checkpoint, *flags, program="interactive"))) == 2


def test_validate(corpus, checkpoint):
    words = ["--task", "translation", "--path", checkpoint, "--valid-subset", "valid", "--max-tokens", 500]
    assert "| loss " in run("validate", corpus, *words)


def test_few_positions(corpus, tmp_path, positions=12):
    """--max-target-positions bounds the length of translations as well."""
    flags = ["--max-target-positions", positions, "--max-source-positions", positions]
    checkpoint = trained(corpus, tmp_path, *flags)
    texts = hypotheses(generated(corpus, checkpoint, "--max-len-b", 100, "--beam", 2))
    assert all(len(text.split()) <= positions for (text,) in texts.values())


@pytest.mark.parametrize(
    "flags, kept",
    [
        (["--ea-rule", "evolving"], "0,2"),
        (["--ea-rule", "predictive"], "1,2"),
    ],
)
def test_layers_that_layerdrop_trained_may_be_left_out(corpus, tmp_path, flags, kept):
    """With the first layer left out, another one is without a map of the layer before, and may have no use for all."""
    arch = [*ARCH, *flags, "--encoder-layers", 3, "--decoder-layers", 3]
    checkpoint = trained(corpus, tmp_path, "--encoder-layerdrop", 0.2, "--decoder-layerdrop", 0.2, arch=arch)
    overrides = f'{{"encoder_layers_to_keep": "{kept}", "decoder_layers_to_keep": "1"}}'
    printed = generated(corpus, checkpoint, "--model-overrides", overrides, "--beam", 2)
    assert len(hypotheses(printed)) == 10


def test_activations_that_are_computed_again(corpus, tmp_path):
    flags = ["--checkpoint-activations", "--offload-activations"]
    state, expected = (
        torch.load(trained(corpus, tmp_path / str(len(extra)), *extra, "--dropout", 0.1), weights_only=True)
        for extra in (flags, [])
    )
    for name, tensor in expected["model"].items():
        torch.testing.assert_close(state["model"][name], tensor, rtol=1e-4, atol=1e-5)


def test_bleu_at_validation(corpus, tmp_path):
    flags = ["--eval-bleu", "--eval-bleu-args", '{"beam": 2, "max_len_b": 15}', "--best-checkpoint-metric", "bleu"]
    checkpoint = trained(corpus, tmp_path, *flags, "--maximize-best-checkpoint-metric")
    best = torch.load(checkpoint, weights_only=True)["extra_state"]["best"]
    assert 0 <= best <= 100 and math.isfinite(best)


def test_several_languages_in_one_model(corpus, tmp_path):
    """translation_multi_simple_epoch prepends language tokens, and mixes directions in an epoch."""
    data = tmp_path / "data"
    data.mkdir()
    for path in corpus.iterdir():
        (data / path.name).symlink_to(path)
    task = ["--task", "translation_multi_simple_epoch", "--langs", "de,en", "--lang-pairs", "de-en,en-de"]
    task += ["--encoder-langtok", "src", "--decoder-langtok", "--sampling-method", "temperature"]
    flags = [word for word in TRAINING if word not in ("--task", "translation")]
    run("train", data, *ARCH, *flags, *task, "--save-dir", tmp_path / "run", "--max-update", 4)
    printed = generated(data, tmp_path / "run" / "checkpoint_last.pt", *task, "-s", "de", "-t", "en", "--beam", 2)
    assert len(hypotheses(printed)) == 10


def test_mixing_decoder_and_encoder_attention_is_refused_with_a_reason(corpus, tmp_path):
    with pytest.raises(ValueError, match="--cross-self-attention: one map would be part encoder-decoder attention"):
        trained(corpus, tmp_path, "--no-cross-attention", "--cross-self-attention")
