"""Promise 9: what records, transforms, derives, counts or changes operations sees the plain composition's numbers."""

import pytest
import torch
from fairseq.modules.fairseq_dropout import FairseqDropout
from fairseq.modules.quantization.scalar import quantize_model_
from helpers.models import amplify_, batch, build
from helpers.promises import each_model, has, lively, outputs
from torch import nn
from torch.autograd import forward_ad, functional
from torch.nn.utils import weight_norm
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


class Hundredfold(Evolution):
    """Computes something else."""

    def forward(self, *args, **kwargs):
        return 100 * super().forward(*args, **kwargs)


CHANGES = {
    "another class": lambda evolution: setattr(evolution, "__class__", Hundredfold),
    "a forward of its own": lambda one: setattr(one, "forward", lambda *maps: 100 * Evolution.forward(one, *maps)),
    "a hook": lambda evolution: evolution.register_forward_hook(lambda module, args, output: 100 * output),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
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


def test_dropout_drops_in_training_alone_but_where_it_is_retained(each_way):
    """fairseq-generate --retain-dropout asks for it through make_generation_fast_."""
    own = EvolvingAttention(Geometry.ENCODER_SELF, 16, 4, dropout=0.5)
    model, x = build("ea_transformer_base", "--attention-dropout", 0.5), torch.randn(5, 2, 16)
    fairseqs = model.encoder.layers[0].self_attn
    for attention in (own, fairseqs):
        assert not torch.equal(attention.train()(x)[0], attention(x)[0])
        assert torch.equal(attention.eval()(x)[0], attention(x)[0])
    model.make_generation_fast_(retain_dropout=True)
    assert not torch.equal(fairseqs(x)[0], fairseqs(x)[0])


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


# ---- a kernel gives first derivatives of one output at a time; it refuses others, which the plain composition gives


def encoders():
    """The same encoder twice, by the kernel and by the plain composition: B x T x C embeddings -> T x B x C."""
    models, source = (build(), build("ea_transformer_base", "--ea-plain")), batch([5, 3])
    models[1].load_state_dict(amplify_(models[0]).state_dict())
    return [lambda x, m=model: m.encoder(source, token_embeddings=x)["encoder_out"][0] for model in models]


def gradient_of_a_gradient(encode, x, backward):
    shift = torch.zeros(16, requires_grad=True)
    (first,) = torch.autograd.grad(encode(x + shift).pow(2).sum(), shift, create_graph=True)
    if backward:
        torch.autograd.backward(first.pow(2).sum(), inputs=[x])
        return x.grad
    return torch.autograd.grad(first.pow(2).sum(), x)[0]


DERIVATIVES = {
    "jvp": lambda encode, x: functional.jvp(encode, x, torch.ones_like(x))[1],
    "hvp": lambda encode, x: functional.hvp(lambda y: encode(y).sin().sum(), x, torch.ones_like(x))[1],
    "grad of some inputs": lambda encode, x: gradient_of_a_gradient(encode, x, False),
    "backward to some inputs": lambda encode, x: gradient_of_a_gradient(encode, x, True),
    "batched": lambda encode, x: functional.jacobian(lambda y: encode(y)[0, 0, :3], x, vectorize=True),
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_other_derivatives_are_given_or_refused(name):
    by_kernel, plain = encoders()
    x = torch.randn(2, 5, 16, requires_grad=True)
    result = DERIVATIVES[name](plain, x)
    assert result.isfinite().all() and result.norm() > 0
    with pytest.raises(RuntimeError, match=r"--ea-plain|Batching rule"):  # the latter is PyTorch's own
        DERIVATIVES[name](by_kernel, x)


def test_a_jacobian_row_by_row_needs_first_derivatives_only():
    x = torch.randn(2, 5, 16)
    one, other = (functional.jacobian(lambda y, f=encode: f(y)[0, 0, :3], x) for encode in encoders())
    assert_close(one, other, rtol=1e-3, atol=1e-4)
    assert one.norm() > 0


# ---- a convolution may be changed as any module of PyTorch may: then the plain composition calls it


@pytest.fixture(params=list(Geometry), ids=lambda geometry: geometry.name)
def attention(request):
    """A function that makes the same attention of a kind at every call."""

    def make():
        torch.manual_seed(1)
        if request.param == Geometry.ENCODER_SELF:
            return EncoderSelfAttention(8, 2, alpha=0.5, beta=0.5)
        own = {"self_attention": request.param == Geometry.DECODER_SELF}
        return DecoderAttention(request.param, 8, 2, beta=0.5, encoder_decoder_attention=not any(own.values()), **own)

    return make


def output(module):
    x = torch.linspace(-2, 2, 5 * 2 * 8).sin().view(5, 2, 8)
    return module(x)[0] if isinstance(module, EncoderSelfAttention) else module(x, x, x)[0]


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_weight_normalisation_takes_effect(attention):
    module, doubled = attention(), attention()
    weight_norm(module.evolution.conv)
    assert_close(output(module), output(doubled))
    module.evolution.conv.weight_g.mul_(2)
    doubled.evolution.conv.weight.mul_(2)
    assert_close(output(module), output(doubled))


@torch.no_grad()
def test_a_forward_hook_takes_effect(attention):
    module, without = attention(), attention()
    module.evolution.conv.register_forward_hook(lambda conv, inputs, result: 0 * result)
    for parameter in without.evolution.conv.parameters():
        parameter.zero_()
    assert_close(output(module), output(without))
    assert not torch.allclose(output(module), output(attention()), atol=1e-4)


def test_quantisation_noise_takes_effect(attention, monkeypatch):
    """fairseq's --quant-noise-scalar, which needs a GPU. Without noise, training gives the same numbers."""
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
    module, rounded, before = attention(), attention(), output(attention())
    quantize_model_(module, p=0, bits=8)
    quantize_model_(rounded, p=1, bits=8)
    assert_close(output(module), before, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(output(rounded), before, atol=1e-4)
    output(rounded).square().sum().backward()
    assert rounded.evolution.conv.weight.grad.abs().max() > 0
