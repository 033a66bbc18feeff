"""Maps survive what copies arguments or computes twice: activation checkpointing and FSDP around any module.

Run as a program, ``test_wrapped.py RANK HOST:PORT``, it is one of two processes under FSDP.
"""

import re
import sys
from functools import partial

import pytest
import torch
from fairseq.modules.checkpoint_activations import checkpoint_wrapper as fairseqs
from helpers import warm
from helpers.models import amplify_, batch, build
from torch import distributed
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper as pytorchs
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.testing import assert_close


def model_and_batches(*more, dropout=0.0):
    torch.manual_seed(1)
    flags = ["--ea-alpha", 0.5, "--ea-beta", 0.5, "--attention-dropout", dropout]
    flags += ["--ea-decoder-alpha", 0.2, "--ea-cross-alpha", 0.1, *more]
    model = amplify_(build("ea_transformer_base", *flags, train=True), 2)
    return model, [(batch([5, 3], seed=n), None, batch([4, 2], eos_first=True, seed=n)) for n in range(2)]


def loss(model, inputs):
    """Of the real positions: what stands at padded ones is nobody's result."""
    return model(*inputs)[0][inputs[2].ne(1)].float().square().mean()


def gradients(model, batches):
    (sum(loss(model, inputs) for inputs in batches) / len(batches)).backward()
    return {name: p.grad for name, p in model.named_parameters()}


WRAPPERS = {
    "fairseq's": fairseqs,
    "PyTorch's, reentrant": partial(pytorchs, checkpoint_impl=CheckpointImpl.REENTRANT),
    "PyTorch's": partial(pytorchs, checkpoint_impl=CheckpointImpl.NO_REENTRANT),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
@pytest.mark.parametrize("part", ["self_attn", "layer"])
def test_checkpointing_changes_no_gradient(part, wrap, each_way):
    model, batches = model_and_batches(dropout=0.3)
    expected = gradients(model, batches)
    model, _ = model_and_batches(dropout=0.3)
    for layers in (model.encoder.layers, model.decoder.layers):
        for number, layer in enumerate(layers):
            if part == "layer":
                layers[number] = wrap(layer)
            else:
                layer.self_attn = wrap(layer.self_attn)
    for name, gradient in gradients(model, batches).items():
        original = name.replace("_checkpoint_wrapped_module.", "")
        assert_close(gradient, expected[original], rtol=1e-5, atol=1e-7, msg=name)


#: the modules that are wrapped, the inner ones first
LEVELS = {"layers": r"layers\.\d+$", "attentions": r"_attn$", "both": r"_attn$|layers\.\d+$"}


def parts_of(model, level):
    return sorted((name for name, _ in model.named_modules() if re.search(LEVELS[level], name)), key=len, reverse=True)


def with_fsdp2(model, level, dtypes):
    options = {"mesh": init_device_mesh("cpu", (2,)), "mp_policy": MixedPrecisionPolicy(**dtypes)}
    for name in parts_of(model, level):
        fully_shard(model.get_submodule(name), **options)
    return fully_shard(model, **options)


def with_fsdp1(model, level, dtypes):
    precision = MixedPrecision(**dtypes, cast_forward_inputs=bool(dtypes))
    options = {"device_id": torch.device("cpu"), "use_orig_params": True, "mixed_precision": precision}
    for name in parts_of(model, level):
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, FSDP(model.get_submodule(name), **options))
    return FSDP(model, **options)


def whole_gradients(model):
    """By fairseq's names."""
    if not isinstance(model, FSDP):
        return {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    with FSDP.summon_full_params(model, with_grads=True):
        return {name.replace("_fsdp_wrapped_module.", ""): p.grad.clone() for name, p in model.named_parameters()}


# Around attentions alone, norms would get bfloat16 beside fairseq's float32 positions, which PyTorch refuses.
CASES = [(False, level) for level in LEVELS] + [(True, "both"), (False, "both", "--ea-learn-mix")]


def worker(rank, address):
    distributed.init_process_group("gloo", init_method=f"tcp://{address}", rank=rank, world_size=2)
    for low_precision, level, *flags in CASES:
        dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if low_precision else {}
        model, batches = model_and_batches(*flags)
        expected = gradients(model.bfloat16() if low_precision else model, batches)
        size = max(gradient.float().norm() for gradient in expected.values())
        for wrap in (with_fsdp2, with_fsdp1):
            model = wrap(model_and_batches(*flags)[0], level, dtypes)
            loss(model, batches[rank]).backward()
            ours = whole_gradients(model)
            assert ours.keys() == expected.keys()
            errors = [(ours[name] - exact.float()).norm() / size for name, exact in expected.items()]
            assert max(errors) <= (0.015 if low_precision else 1e-6), (wrap.__name__, level, low_precision, errors)
            print("equal", wrap.__name__, level, low_precision)
    distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes_under_fsdp_equal_one():
    """FSDP of both versions, around layers and around attentions, in float32 and in bfloat16, with learnt shares."""
    log, _ = warm.two_ranks(lambda rank, address: [sys.executable, __file__, rank, address])
    assert log.count("equal") == 2 * len(CASES)


if __name__ == "__main__":
    worker(int(sys.argv[1]), sys.argv[2])
