"""ea_bart keeps the promises of an encoder with a decoder, and serves fairseq's tasks and hub interface."""

import pytest
import torch
from helpers.models import batch
from helpers.other_models import BART, TRAINING, build, monolingual, parallel, run, whole_words

from ea_fairseq import EABARTModel


def test_classification_reads_the_last_token_of_the_decoder():
    model = build("ea_bart")
    model.register_classification_head("entailment", num_classes=3)
    tokens = batch([6, 3])
    assert model(tokens, None, tokens.roll(1, 1), classification_head_name="entailment")[0].shape == (2, 3)


ALL = ["--required-batch-size-multiple", 1]
POSITIONS = ["--max-source-positions", 40, "--max-target-positions", 40]


def denoise(data, folder, arch, *flags):
    """A moment of pre-training."""
    run(
        *("train", data, "--task", "denoising", "--criterion", "cross_entropy", "--arch", arch, *BART, *TRAINING),
        *(*POSITIONS, "--tokens-per-sample", 32, "--sample-break-mode", "complete", "--mask", 0.3),
        *("--mask-length", "span-poisson", "--replace-length", 1, "--poisson-lambda", 2, "--save-dir", folder, *flags),
    )


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """ea_bart, trained on denoising for a moment; its data."""
    folder = tmp_path_factory.mktemp("bart")
    data = monolingual(folder)
    denoise(data, folder / "run", "ea_bart")
    return folder


def translation_data(pretrained, folder):
    return parallel(folder, pretrained / "bin/dict.txt")


@pytest.mark.slow
def test_fine_tunes_on_translation_and_translates(pretrained, tmp_path):
    """The dictionary of translation has no <mask>, whose row fairseq takes off the embeddings."""
    data = translation_data(pretrained, tmp_path)
    log = run(
        *("train", data, "--task", "translation", "--arch", "ea_bart", *BART, *TRAINING, *POSITIONS),
        *("--criterion", "label_smoothed_cross_entropy", "--label-smoothing", 0.1, "--save-dir", tmp_path / "run"),
        *("--finetune-from-model", pretrained / "run/checkpoint_last.pt"),
    )
    assert "Loaded checkpoint" in log and "start fresh" not in log
    generated = run(
        *("generate", data, "--path", tmp_path / "run/checkpoint_last.pt", "--gen-subset", "valid"),
        *("--beam", 3, "--max-len-b", 8, "--batch-size", 4, *ALL),
    )
    assert generated.count("\nH-") == 20


@pytest.mark.slow
def test_from_a_plain_bart_to_translation(pretrained, tmp_path):
    denoise(pretrained / "bin", tmp_path / "plain", "bart_base")
    log = run(
        *("train", translation_data(pretrained, tmp_path), "--task", "translation", "--arch", "ea_bart", *BART),
        *(*TRAINING, *POSITIONS, "--criterion", "cross_entropy", "--save-dir", tmp_path / "run"),
        *("--restore-file", tmp_path / "plain/checkpoint_last.pt"),
        *("--reset-optimizer", "--reset-dataloader", "--reset-meters"),
    )
    assert "decoder.layers.1.encoder_attn.evolution.conv.weight" in log


def test_translation_from_pretrained_bart(pretrained, tmp_path):
    """The task of mBART adds a symbol for each language, here to data whose model starts from nothing."""
    data = translation_data(pretrained, tmp_path)
    flags = ["--langs", "de,en", "--source-lang", "de", "--target-lang", "en"]
    log = run(
        *("train", data, "--task", "translation_from_pretrained_bart", "--arch", "ea_mbart_base", *BART, *TRAINING),
        *(*POSITIONS, *flags, "--criterion", "cross_entropy", "--save-dir", tmp_path / "run"),
    )
    assert "done training" in log
    generated = run(
        *("generate", data, "--task", "translation_from_pretrained_bart", *flags, "--gen-subset", "valid"),
        *("--path", tmp_path / "run/checkpoint_last.pt", "--beam", 2, "--max-len-b", 8, "--batch-size", 4, *ALL),
    )
    assert generated.count("\nH-") == 20


def test_hub_interface_fills_masks_and_samples(pretrained, tmp_path):
    options = {"bpe": "subword_nmt", "bpe_codes": str(whole_words(tmp_path / "codes"))}
    hub = EABARTModel.from_pretrained(
        str(pretrained / "run"), "checkpoint_last.pt", str(pretrained / "bin"), **options
    ).eval()
    (filled,) = hub.fill_mask(["w3 w4 <mask> w6"], topk=2, beam=3, match_source_len=False, max_len_b=9)
    assert len(filled) == 2 and all(isinstance(text, str) for text, _ in filled)
    assert isinstance(hub.sample(["w3 w4 w5"], beam=2, max_len_b=9)[0], str)
    assert hub.extract_features(torch.tensor([0, 5, 6, 2])).shape == (1, 4, 16)
