"""A bidirectional decoder keeps the promises: loops, padding and batches, fairseq's own model, maps handed on."""

import pytest
import torch
from helpers import reference
from helpers.models import amplify_, batch, build
from helpers.promises import check_alone_or_in_a_batch
from torch.testing import assert_close

from ea_fairseq.attention import DecoderAttention
from evolving_attention.evolution import Evolution, Geometry

ARCH = "ea_cmlm_transformer"
MODELS = {
    "evolving": "--ea-beta 0.4",
    "hands on maps": "--ea-beta 0.4 --ea-decoder-alpha 0.4 --ea-cross-alpha 0.3 --decoder-layers 3",
    "from the second": "--ea-rule evolving-from-second --ea-beta 0.4 --ea-decoder-alpha 0.4",
    "learnt, pre-norm": "--ea-learn-mix --ea-decoder-alpha 0.3 --decoder-normalize-before --ea-conv gated",
    "predictive": "--ea-rule predictive --ea-decoder-alpha 0.4 --decoder-layers 3",
}
each_model = pytest.mark.parametrize("flags", MODELS.values(), ids=MODELS)


def lively(flags, **options):
    return amplify_(build(ARCH, *flags.split(), **options))


def scores(model, source, target):
    """B x T x V"""
    return model.decoder(normalize=False, encoder_out=model.encoder(source), prev_output_tokens=target)


@pytest.mark.parametrize("options", [{"alpha": 0.4}, {"kernel_size": 5}], ids=str)
def test_its_attentions_against_loops(options):
    """Windows are the encoder's, in encoder-decoder attention, too."""
    firsts = [True, False, False] if "alpha" in options else [True]
    sides = {"self_attention": True}, {"kdim": 7, "vdim": 7, "encoder_decoder_attention": True}
    own, cross = (
        [DecoderAttention(Geometry.ENCODER_SELF, 6, 3, first=first, beta=0.3, **options, **side) for first in firsts]
        for side in sides
    )
    reference.compare_decoder(own, [1, 0, 0, 0], kind="encoder")
    reference.compare_decoder(cross, [1, 0, 0, 0, 0], [0, 0, 1, 1], kind="encoder")


@each_model
@torch.no_grad()
def test_a_sentence_has_the_same_output_alone_or_in_a_batch(flags, each_way):
    for left in (False, True):
        check_alone_or_in_a_batch(lively(flags), left, left, scores)


@each_model
def test_each_layer_has_the_window_of_both_directions_and_takes_the_map_before(flags):
    """Gradients reach all parameters."""
    model = lively(flags, train=True)
    scores(model, batch([6, 3]), batch([5, 4])).square().mean().backward()
    assert {x.geometry for x in model.modules() if isinstance(x, Evolution)} == {Geometry.ENCODER_SELF}
    evolutions = [x for x in model.decoder.modules() if isinstance(x, Evolution)]
    later = len(model.decoder.layers) - 1
    assert sum(x.takes_map for x in evolutions) == later * sum(f"--ea-{x}-alpha" in flags for x in ("decoder", "cross"))
    assert all(x.conv is not None for x in evolutions if x.takes_map or "predictive" not in flags), "as in decoders"
    left = [key for key, p in model.named_parameters() if p.grad is None or p.grad.abs().sum() == 0]
    assert [key for key in left if not key.endswith("k_proj.bias")] == ["decoder.embed_length.weight"]


@torch.no_grad()
def test_without_evolution_it_is_fairseqs(each_way):
    theirs = build("cmlm_transformer")
    ours = build(ARCH, "--ea-alpha", 0, "--ea-beta", 0)
    ours.load_state_dict(theirs.state_dict())
    source, target = batch([7, 4, 1]), batch([5, 2, 6])
    assert_close(scores(ours, source, target), scores(theirs, source, target), rtol=1e-5, atol=1e-5)
    lengths = (
        model.decoder.forward_length(normalize=True, encoder_out=model.encoder(source)) for model in (ours, theirs)
    )
    assert_close(*lengths, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "rule",
    ["predictive --ea-conv-layers 2 --ea-learn-mix --ea-relative-positions 8", "realformer --ea-score multiplicative"],
)
def test_a_rule_for_encoders_brings_no_convolution_into_the_decoder(rule):
    decoder = build(ARCH, *f"--ea-rule {rule}".split()).decoder
    evolutions = [module for module in decoder.modules() if isinstance(module, Evolution)]
    assert evolutions
    assert not any(list(evolution.parameters()) for evolution in evolutions)
