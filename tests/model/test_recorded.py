"""Promise 9: what records, transforms, derives, counts or changes operations sees the plain composition's numbers."""

import copy

import pytest
import torch
from fairseq.modules.fairseq_dropout import FairseqDropout
from fairseq.modules.quantization.scalar import quantize_model_
from helpers.models import batch, build
from helpers.promises import each_model, has, lively, outputs
from torch import nn
from torch.autograd import forward_ad, functional
from torch.nn.utils import weight_norm
from torch.testing import assert_close

from ea_fairseq.attention import DecoderAttention, EncoderSelfAttention
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


def hundredfold(module):
    """Its forward, times 100, as a class or a module may have it."""
    forward = module.forward
    return staticmethod(lambda *maps: 100 * forward(*maps))


#: changes of an evolution or of its convolution, after which it gives a hundred times its numbers
CHANGES = {
    "another class": lambda x: setattr(x, "__class__", type("Other", (type(x),), {"forward": hundredfold(x)})),
    "a forward of its own": lambda x: setattr(x, "forward", hundredfold(x)),
    "a hook": lambda x: x.register_forward_hook(lambda module, args, output: 100 * output),
    "weight normalisation": lambda conv: weight_norm(conv).weight_g.mul_(100),
}


@pytest.mark.parametrize(
    ("part", "change"),
    [
        (part, change)
        for part in ("evolution", "evolution.conv")
        for change in CHANGES
        if part == "evolution.conv" or change != "weight normalisation"
    ],
)
@torch.no_grad()
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_no_kernel_computes_a_changed_evolution(part, change, asked):
    """It may be changed as any module of PyTorch may: then the plain composition calls it."""
    module, x = EncoderSelfAttention(8, 2, alpha=0.5, beta=0.5).eval(), torch.randn(5, 1, 8)
    module.evolution.conv.bias.zero_()
    expected = copy.deepcopy(module)
    expected.evolution.conv.weight.mul_(1 if part == "evolution" else 100)
    a_logit = expected(x, keep_map=True)[1] * (100 if part == "evolution" else 1)
    assert asked == [True]
    CHANGES[change](module.get_submodule(part))
    assert_close(module(x, keep_map=True)[1], a_logit, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("part", "kind"),
    [("evolution", "register_full_backward_hook"), ("evolution.conv", "register_full_backward_pre_hook")],
)
def test_hooks_on_the_way_back_run(part, kind, asked):
    module, calls = EncoderSelfAttention(8, 2, alpha=0.5, beta=0.5), []
    getattr(module.get_submodule(part), kind)(lambda *_: calls.append(1))
    module(torch.randn(5, 1, 8))[0].sum().backward()
    assert (calls, asked) == ([1], [])


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


def gradient_of_a_gradient(encode, x):
    """Of some inputs."""
    shift = torch.zeros(16, requires_grad=True)
    (first,) = torch.autograd.grad(encode(x + shift).pow(2).sum(), shift, create_graph=True)
    return torch.autograd.grad(first.pow(2).sum(), x)[0]


DERIVATIVES = {
    "jvp": lambda encode, x: functional.jvp(encode, x, torch.ones_like(x))[1],
    "second": gradient_of_a_gradient,
    "batched": lambda encode, x: functional.jacobian(lambda y: encode(y)[0, 0, :3], x, vectorize=True),
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_other_derivatives_are_given_or_refused(name):
    by_kernel, plain = (EncoderSelfAttention(16, 4, beta=0.5, plain=way).eval() for way in (False, True))
    x = torch.randn(5, 2, 16, requires_grad=True)
    result = DERIVATIVES[name](lambda x: plain(x)[0], x)
    assert result.isfinite().all() and result.norm() > 0
    with pytest.raises(RuntimeError, match=r"--ea-plain|Batching rule"):  # the latter is PyTorch's own
        DERIVATIVES[name](lambda x: by_kernel(x)[0], x)


@pytest.mark.parametrize("geometry", Geometry, ids=lambda geometry: geometry.name)
def test_quantisation_noise_takes_effect(geometry, monkeypatch):
    """fairseq's --quant-noise-scalar, which needs a GPU. Without noise, training gives the same numbers."""
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
    evolution, maps = Evolution(geometry, 2, beta=0.5), 0.2 * torch.randn(1, 2, 5, 5)
    module, rounded, before = copy.deepcopy(evolution), copy.deepcopy(evolution), evolution(maps)
    quantize_model_(module, p=0, bits=8)
    quantize_model_(rounded, p=1, bits=8)
    assert_close(module(maps), before, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(rounded(maps), before, atol=1e-4)
    rounded(maps).square().sum().backward()
    assert rounded.conv.weight.grad.abs().max() > 0
