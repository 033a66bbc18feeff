"""Promise 9: what records, transforms or counts operations sees the plain composition, and its results are right."""

import pytest
import torch
from fairseq.modules import MultiheadAttention
from fairseq.modules.fairseq_dropout import FairseqDropout
from helpers.models import batch, build
from helpers.promises import each_model, has, lively, outputs
from torch import nn
from torch.autograd import forward_ad
from torch.testing import assert_close

from ea_fairseq.attention import DecoderAttention, EncoderSelfAttention, Padding
from evolving_attention import EvolvingAttention, kernels
from evolving_attention.evolution import Evolution, Geometry

OTHER_MODELS = ["language model", "RoBERTa", "BART"]


@pytest.fixture
def asked(monkeypatch):
    """The kernels' answers: True for each call that one of them computed."""
    answers, kernel_for = [], kernels.kernel_for

    def watched(call):
        kernel = kernel_for(call)
        answers.append(kernel is not None)
        return kernel

    monkeypatch.setattr(kernels, "kernel_for", watched)
    return answers


class Part(nn.Module):
    """A function of a module, from tensors to one tensor, as a module."""

    def __init__(self, model, run):
        super().__init__()
        self.model, self.run = model, run

    def forward(self, *tensors):
        return self.run(self.model, *tensors)


def two_steps(decoder, tokens, encoder_out, encoder_padding_mask):
    """The scores of the first two words, B x 2 x V."""
    encoded, state = {"encoder_out": [encoder_out], "encoder_padding_mask": [encoder_padding_mask]}, {}
    steps = [decoder(tokens[:, :n], encoder_out=encoded, incremental_state=state)[0] for n in (1, 2)]
    return torch.cat(steps, dim=1)


def pair(sources, targets, seed, left_pad=False):
    """A batch of sentences of these lengths: B x S and B x T tokens. left_pad: of the targets."""
    return batch(sources, seed=seed), batch(targets, eos_first=True, left_pad=left_pad, seed=seed)


FIRST = pair([6, 3], [5, 4], seed=1)
#: of the same shape, with other words and other padding
OTHERS = pair([6, 5], [5, 2], seed=2), pair([6, 6], [5, 5], seed=3), pair([6, 4], [5, 3], seed=4, left_pad=True)


@each_model(["kernel 5", "skips in decoders", "relative, additive", "two branches, predictive", *OTHER_MODELS])
@torch.no_grad()
def test_a_recorded_model_gives_the_numbers_for_other_sentences_too(name):
    model = Part(lively(name), outputs)
    traced = torch.jit.trace(model, FIRST, check_trace=False)
    exported = torch.export.export(model, FIRST, strict=False).module()
    for source, target in (FIRST, *OTHERS):
        real = (target if has(model.model, "decoder") else source).ne(1)
        expected = model(source, target)[real]
        for ours in (traced, exported):
            assert_close(ours(source, target)[real], expected, rtol=1e-5, atol=1e-5)


@each_model(["kernel 5", "language model", "RoBERTa"])
def test_a_compiled_model_trains_as_the_eager_one(name):
    model = lively(name)

    def gradients(run):
        real = (FIRST[1] if has(model, "decoder") else FIRST[0]).ne(1)
        wanted = [parameter for key, parameter in model.named_parameters() if "evolution" in key or "_proj" in key]
        return torch.autograd.grad(run(model, *FIRST)[real].square().mean(), wanted)

    compiled = torch.compile(outputs, fullgraph=True, backend="aot_eager")
    assert_close(gradients(compiled), gradients(outputs), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_exported_steps_give_the_numbers():
    model = lively("kernel 5")
    step, tokens = Part(model.decoder, two_steps), batch([2, 2], eos_first=True)
    inputs, others = (
        (tokens, encoded["encoder_out"][0], encoded["encoder_padding_mask"][0])
        for encoded in (model.encoder(source) for source, _ in (FIRST, OTHERS[0]))
    )
    exported = torch.export.export(step, inputs, strict=False).module()
    assert_close(exported(*others), step(*others), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("flags", [[], ["--ea-alpha", 0, "--ea-beta", 0]], ids=["evolving", "plain"])
def test_jit_script_is_refused_in_one_line(flags):
    with pytest.raises(NotImplementedError, match=r"^torch\.jit\.script cannot read .*: use torch\.export.*$"):
        torch.jit.script(build("ea_transformer_base", *flags))


@pytest.mark.parametrize("gradients", [True, False], ids=["with gradients", "without"])
def test_transforms_and_forward_mode_differentiate_the_plain_composition(gradients):
    module = EncoderSelfAttention(8, 2, alpha=0.5, beta=0.5).eval()
    x, direction = torch.randn(5, 2, 8, requires_grad=True), torch.randn(5, 2, 8)

    def loss(x):
        return module(x)[0].square().sum()

    (expected,) = torch.autograd.grad(loss(x), x)
    x = x.detach()
    assert_close(torch.func.grad(loss)(x), expected, rtol=1e-4, atol=1e-5)
    with torch.set_grad_enabled(gradients):
        _, slope = torch.func.jvp(loss, (x,), (direction,))
        with forward_ad.dual_level():
            dual = forward_ad.unpack_dual(loss(forward_ad.make_dual(x, direction))).tangent
    for ours in (slope, dual):
        assert_close(ours, (expected * direction).sum(), rtol=1e-4, atol=1e-4)


def hundredfold(evolution):
    """The same module with another class, which computes something else."""

    class Hundredfold(Evolution):
        def forward(self, *args, **kwargs):
            return 100 * super().forward(*args, **kwargs)

    evolution.__class__ = Hundredfold


def with_own_forward(evolution):
    forward = evolution.forward
    evolution.forward = lambda *args, **kwargs: 100 * forward(*args, **kwargs)


def with_a_hook(evolution):
    evolution.register_forward_hook(lambda module, args, output: 100 * output)


@pytest.mark.parametrize("change", [hundredfold, with_own_forward, with_a_hook])
@torch.no_grad()
def test_no_kernel_computes_a_changed_evolution(change, asked):
    module, x = EncoderSelfAttention(8, 2, alpha=0.5, beta=0.5).eval(), torch.randn(5, 1, 8)
    before = module(x, keep_map=True)[1]
    assert asked == [True]
    change(module.evolution)
    assert_close(module(x, keep_map=True)[1], 100 * before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("part", "kind"),
    [("evolution", "register_full_backward_hook"), ("evolution.conv", "register_full_backward_pre_hook")],
)
def test_hooks_on_the_way_back_run(part, kind, asked):
    module, calls = EncoderSelfAttention(8, 2, alpha=0.5, beta=0.5), []
    getattr(module.get_submodule(part), kind)(lambda *_: calls.append(1))
    module(torch.randn(5, 1, 8))[0].sum().backward()
    assert (calls, asked) == ([1], [])


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
@torch.no_grad()
def test_a_mask_of_floats_is_added(kind, each_way):
    """As to fairseq's attention: a bias for each pair of positions, and lowest numbers for masked ones."""
    if kind == "encoder":
        module = EncoderSelfAttention(8, 2, beta=0).eval()
    else:
        module = DecoderAttention(Geometry.DECODER_SELF, 8, 2, beta=0, self_attention=True).eval()
    x = torch.randn(5, 2, 8)
    for lowest in (-torch.inf, -1e8, -1e4):
        bias = torch.randn(5, 5).masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), lowest)
        output = module(x, attn_mask=bias)[0] if kind == "encoder" else module(x, x, x, attn_mask=bias)[0]
        stock, _ = MultiheadAttention.forward(module, x, x, x, attn_mask=bias)
        assert_close(output, stock, rtol=1e-5, atol=1e-5)


def test_a_mask_may_have_any_type_and_no_other_shape(each_way):
    """Under autocast, too, where a bias has another type than the logits."""
    module, x = EncoderSelfAttention(8, 2, beta=0.5).eval(), torch.randn(4, 1, 8)
    future = torch.ones(4, 4, dtype=torch.bool).triu(1)
    floats = torch.zeros(4, 4).masked_fill(future, -torch.inf)
    expected = module(x, attn_mask=future)[0]
    assert_close(module(x, attn_mask=future.byte())[0], expected)
    assert_close(module(x, attn_mask=floats)[0], expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(module(x, attn_mask=floats)[0].float(), expected, rtol=0.05, atol=0.05)
    with pytest.raises(ValueError, match=r"attn_mask must be T x S.*\(4,\)"):
        module(x, attn_mask=future[0])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32], ids=str)
@torch.no_grad()
def test_padding_may_have_numbers_of_any_type(dtype, each_way):
    """As to fairseq's attention: every number but zero is padding."""
    x, y, padding = torch.randn(4, 2, 8), torch.randn(5, 2, 8), torch.tensor([[0, 0, 0, 0, 0], [0, 0, 0, 2, 1]])
    encoder = EncoderSelfAttention(8, 2, beta=0.5).eval()
    cross = DecoderAttention(Geometry.ENCODER_DECODER, 8, 2, beta=0.5, encoder_decoder_attention=True).eval()

    def outputs(padding):
        whole, state = Padding(padding, padding[:, -4:]), {}
        rows = [cross(row[None], y, y, key_padding_mask=padding, incremental_state=state)[0] for row in x]
        return encoder(y, key_padding_mask=padding)[0], cross(x, y, y, key_padding_mask=whole)[0], torch.cat(rows)

    for ours, expected in zip(outputs(padding.to(dtype)), outputs(padding.bool()), strict=True):
        assert_close(ours, expected)


def test_dropout_drops_in_training_alone(each_way):
    own = EvolvingAttention(Geometry.ENCODER_SELF, 16, 4, dropout=0.5)
    fairseqs = build("ea_transformer_base", "--attention-dropout", 0.5).encoder.layers[0].self_attn
    x = torch.randn(5, 2, 16)
    for attention in (own, fairseqs):
        for training in (True, False):
            attention.train(training)
            first, second = (attention(x)[0] for _ in range(2))
            assert torch.equal(first, second) != training


def test_retained_dropout_drops_in_evaluation(each_way):
    """fairseq-generate --retain-dropout asks for it through make_generation_fast_."""
    model = build("ea_transformer_base", "--attention-dropout", 0.5)
    model.make_generation_fast_(retain_dropout=True)
    layer, x = model.encoder.layers[0], torch.randn(5, 1, 16)
    first, second = (layer.self_attn(x)[0] for _ in range(2))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("flags", [[], ["--ea-plain"]], ids=["kernel", "plain"])
def test_dropout_has_the_names_by_which_fairseq_asks_for_it(flags):
    """--retain-dropout-modules names fairseq's classes."""

    def names(arch, *flags):
        modules = build(arch, *flags).named_modules()
        return {place: one.module_name for place, one in modules if isinstance(one, FairseqDropout)}

    assert names("ea_transformer_base", *flags) == names("transformer")


@pytest.mark.parametrize("lowest", [-1e4, -1e8, -3.4e38, -torch.inf])
def test_a_float_mask_that_only_hides_is_a_bool_mask(lowest):
    """To the bit: the kernel gets no logits, and is as fast. A mask that is learnt still has a gradient."""
    module = DecoderAttention(Geometry.DECODER_SELF, 16, 4, self_attention=True).eval()
    x, future = torch.randn(5, 2, 16), torch.ones(5, 5, dtype=torch.bool).triu(1)
    floats = torch.zeros(5, 5).masked_fill(future, lowest)
    assert torch.equal(module(x, x, x, attn_mask=floats)[0], module(x, x, x, attn_mask=future)[0])
    assert module.call(*torch.randn(3, 2, 4, 5, 4), attn_mask=floats).given is None
    compiled = torch.compile(module, fullgraph=True, backend="eager")  # which cannot look at numbers
    assert_close(compiled(x, x, x, attn_mask=floats)[0], module(x, x, x, attn_mask=future)[0])
    module(x, x, x, attn_mask=floats.requires_grad_())[0].square().sum().backward()
    assert floats.grad.tril().abs().sum() > 0
