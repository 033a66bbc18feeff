"""A bidirectional decoder keeps the promises: loops, padding and batches, fairseq's own model, maps handed on."""

import pytest
import torch
from fairseq.criterions.nat_loss import LabelSmoothedDualImitationCriterion
from fairseq.iterative_refinement_generator import IterativeRefinementGenerator
from helpers import reference
from helpers.models import amplify_, batch, build, dictionary, tiny_task
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
def test_each_layer_has_the_window_of_both_directions_and_the_map_before(flags):
    """Maps reach the next layer, and gradients all parameters."""
    model, seen = lively(flags, train=True), {"self_attn": [], "encoder_attn": []}
    for layer in model.decoder.layers:
        for name, maps in seen.items():
            if hasattr(getattr(layer, name), "evolution"):
                getattr(layer, name).observer = maps.append
    source, target = batch([6, 3]), batch([5, 4])
    scores(model, source, target).square().mean().backward()
    assert {x.geometry for x in model.modules() if isinstance(x, Evolution)} == {Geometry.ENCODER_SELF}
    evolutions = [x for x in model.decoder.modules() if isinstance(x, Evolution)]
    assert all(x.conv is not None for x in evolutions if x.takes_map or "predictive" not in flags), "as in decoders"
    for name, alpha in (("self_attn", "--ea-decoder-alpha"), ("encoder_attn", "--ea-cross-alpha")):
        for before, after in zip(seen[name], seen[name][1:], strict=False):
            assert (after.previous is not None) == (alpha in flags)
            if after.previous is not None:
                assert_close(after.previous, before.a_logit)
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


def test_it_learns_and_generates():
    """By fairseq's criterion and generator, alone and as an ensemble."""
    torch.manual_seed(1)
    model = build(ARCH, "--ea-beta", 0.2, "--ea-decoder-alpha", 0.2, "--criterion", "nat_loss", train=True)
    criterion = LabelSmoothedDualImitationCriterion(tiny_task("translation"), 0.1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    source = batch([4, 6, 5])
    bos, words = torch.zeros(3, 1, dtype=torch.long), dictionary()
    target = torch.cat([bos, source], dim=1)  # a copy
    masked = target.masked_fill(target.gt(3), words.unk())
    net_input = {"src_tokens": source, "src_lengths": source.ne(1).sum(1), "prev_output_tokens": masked}
    sample = {"id": torch.arange(3), "net_input": net_input, "prev_target": masked, "target": target}
    losses = []
    for _ in range(80):
        optimizer.zero_grad()
        loss, *_ = criterion(model, {**sample, "nsentences": 3, "ntokens": 15})
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0] / 2
    model.eval()
    generator = IterativeRefinementGenerator(words, max_iter=0)
    for models in ([model], [model, model]):
        hypotheses = generator.generate(models, sample)
        assert [one[0]["tokens"].tolist() for one in hypotheses] == [row[row.ne(1)].tolist() for row in target]


@pytest.mark.parametrize(
    "rule",
    ["predictive --ea-conv-layers 2 --ea-learn-mix --ea-relative-positions 8", "realformer --ea-score multiplicative"],
)
def test_a_rule_for_encoders_brings_no_convolution_into_the_decoder(rule):
    decoder = build(ARCH, *f"--ea-rule {rule}".split()).decoder
    evolutions = [module for module in decoder.modules() if isinstance(module, Evolution)]
    assert evolutions
    assert not any(list(evolution.parameters()) for evolution in evolutions)
