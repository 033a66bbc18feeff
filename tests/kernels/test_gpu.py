"""The GPU kernels give the numbers of the plain composition, forward and every gradient.

Without a GPU they run in Triton's interpreter, which shows what they compute; ``test_compiles_for_an_H100`` then shows
that the compiler takes them, too: run as a program, this file compiles them and prints the registers they need.
"""

import gc
import json
import os
import re
import subprocess
import sys
import tempfile
from copy import deepcopy
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from conftest import batch, build
from torch.multiprocessing.reductions import StorageWeakRef

from ea_fairseq import cpu, gpu
from ea_fairseq.evolution import Evolution, Geometry

ENCODER, DECODER, CROSS = Geometry
HALF, BFLOAT, SINGLE, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def import_kernels():
    """Triton decides on its interpreter when it is imported; other tests must not find it switched on."""
    before = os.environ.get("TRITON_INTERPRET")
    if DEVICE == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    try:
        pytest.importorskip("triton")
        from ea_fairseq import gpu_kernels as kernels
    finally:
        if before is None:
            os.environ.pop("TRITON_INTERPRET", None)
        else:
            os.environ["TRITON_INTERPRET"] = before
    return kernels


if __name__ != "__main__":
    kernels = import_kernels()


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(kernels, "PARTIAL_SUMS", 3)  # of several rows each
    if DEVICE == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        round_as_gpus_do(monkeypatch)


def round_as_gpus_do(monkeypatch):
    """Triton's interpreter cuts float32 off to bfloat16 where a GPU rounds to the nearest."""
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def rounded(data, given, wanted, mode):
        if (given, wanted) != (interpreter.tl.float32, interpreter.tl.bfloat16):
            return convert(data, given, wanted, mode)
        data = torch.from_numpy(data.astype("float32")).to(BFLOAT).view(torch.int16).numpy()
        return data.view("uint16")

    monkeypatch.setattr(interpreter, "_convert_float", rounded)


class Case(NamedTuple):
    """One call. ``masks``: "" or words of padding, rows, future, all (see ``masks_of``)."""

    geometry: Geometry = ENCODER
    heads: int = 3
    k: int = 3
    length: int = 5
    columns: int = 6
    masks: str = ""
    dtype: torch.dtype = SINGLE
    alpha: float = 0.4
    beta: float = 0.3
    previous: bool = True
    width: int = 4
    batch: int = 2


def masks_of(case):
    """hidden and masked: padded keys, padded queries (hidden only), the future, one row that is all masked."""
    masked, hidden = [], []
    if "padding" in case.masks:
        padding = torch.zeros(case.batch, 1, 1, case.columns, dtype=torch.bool, device=DEVICE)
        padding[0, ..., -2:] = True
        masked.append(padding)
    if "future" in case.masks:
        masked.append(torch.ones(case.length, case.columns, dtype=torch.bool, device=DEVICE).triu(1)[None, None])
    if "all" in case.masks:
        masked.append(torch.zeros(case.batch, 1, case.length, case.columns, dtype=torch.bool, device=DEVICE))
        masked[-1][-1, 0, 1] = True
    if "rows" in case.masks:
        rows = torch.zeros(case.batch, 1, case.length, 1, dtype=torch.bool, device=DEVICE)
        rows[0, 0, -1] = True
        hidden.append(rows)
    return union([*masked, *hidden]), union(masked)


def union(masks):
    return None if not masks else masks[0] if len(masks) == 1 else masks[0] | union(masks[1:])


def evolution_of(case):
    evolution = Evolution(case.geometry, case.heads, case.k, case.alpha, case.beta).to(DEVICE, case.dtype)
    for parameter in evolution.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return evolution


def tensors_of(case):
    """q, k, v as views of T x B x C, as a model has them; and a map of the layer before."""

    def split(length):
        x = torch.randn(length, case.batch, case.heads * case.width, device=DEVICE).to(case.dtype)
        return x.view(length, case.batch, case.heads, case.width).permute(1, 2, 0, 3).requires_grad_()

    q, k, v = split(case.length), split(case.columns), split(case.columns)
    if not case.previous:
        return [q, k, v, None]
    previous = torch.randn(case.batch, case.heads, case.length, case.columns, device=DEVICE)
    return [q, k, v, previous.to(case.dtype).requires_grad_()]


def plain(q, k, v, evolution, hidden=None, masked=None, previous=None, keep=None):
    """What the kernels have to give, by torch; ``keep``: what dropout multiplies by."""
    a_logit = evolution(q @ k.transpose(2, 3), hidden, previous)
    logits = a_logit if masked is None else a_logit.masked_fill(masked, torch.finfo(a_logit.dtype).min)
    probs = F.softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, SINGLE)).to(v.dtype)
    return (probs if keep is None else probs * keep.to(v.dtype)) @ v, a_logit


def kernel(q, k, v, evolution, hidden=None, masked=None, previous=None, **options):
    assert gpu.unavailable(q) is None
    options = {"keep_map": True, **options}
    return gpu.evolving_attention(q, k, v, evolution, hidden=hidden, masked=masked, previous=previous, **options)


def results(run, tensors, evolution, hidden, masked, upstream=True):
    """Context, A_logit (0 where hidden: there it means nothing) and all gradients of an uneven functional of both."""
    *qkv, previous = tensors
    context, a_logit = run(*qkv, evolution, hidden, masked, previous)
    loss = (context * probe(context)).sum() + (a_logit * probe(a_logit)).sum() * upstream
    inputs = [x for x in [*tensors, *evolution.parameters()] if x is not None]
    gradients = torch.autograd.grad(loss, inputs)
    for given, gradient in zip(inputs, gradients, strict=True):
        assert gradient.shape == given.shape
        assert gradient.dtype == given.dtype
    return [context.detach(), a_logit.detach(), *gradients]


def probe(x):
    return torch.linspace(-1, 2, x.numel(), device=x.device, dtype=x.dtype).view(x.shape)


def exact(case, tensors, evolution):
    """The same inputs in float64."""
    twin = Evolution(case.geometry, case.heads, case.k, case.alpha, case.beta).to(DEVICE, DOUBLE)
    twin.load_state_dict(evolution.state_dict())
    return [None if x is None else x.detach().double().requires_grad_() for x in tensors], twin


def check(case):
    """float32: 1e-5 of the largest number. Less: at most 1.5 times as far from float64 as the plain composition is."""
    tensors, evolution = tensors_of(case), evolution_of(case)
    masks = masks_of(case)
    ours = results(kernel, tensors, evolution, *masks)
    twins, twin = exact(case, tensors, evolution)
    truth = results(plain, twins, twin, *masks)
    theirs = results(plain, tensors, evolution, *masks) if case.dtype != SINGLE else truth
    for number, (mine, other, true) in enumerate(zip(ours, theirs, truth, strict=True)):
        assert mine.isfinite().all()
        if case.dtype == SINGLE:
            assert (mine - true).abs().max() <= 1e-5 * true.abs().max(), f"result {number}"
        else:
            error, allowed = (mine - true).norm(), 1.5 * (other - true).norm()
            assert error <= allowed + 1e-3 * torch.finfo(case.dtype).eps * true.norm(), f"result {number}"


# each geometry, k, mask, type and kind of length with most of the others
CASES = [
    Case(ENCODER, 4, 3, 6, 6, "padding rows"),
    Case(ENCODER, 1, 1, 1, 1, "", previous=False),
    Case(ENCODER, 8, 3, 3, 3, "padding rows all", BFLOAT),
    Case(ENCODER, 2, 5, 5, 6, "rows", HALF),
    Case(ENCODER, 5, 5, 3, 3, "padding", previous=False),
    Case(ENCODER, 3, 3, 4, 16, "padding all", alpha=1, beta=1),
    Case(DECODER, 4, 3, 7, 7, "future padding rows", previous=False),
    Case(DECODER, 3, 5, 6, 6, "future", HALF, previous=False),
    Case(DECODER, 16, 1, 4, 4, "future", previous=False),
    Case(DECODER, 3, 3, 2, 2, "future all", BFLOAT, previous=False, width=40),
    Case(CROSS, 4, 3, 3, 9, "padding", HALF, previous=False),
    Case(CROSS, 4, 5, 4, 2, "padding rows", previous=False),
    Case(CROSS, 8, 3, 3, 1, "rows all", BFLOAT, previous=False),
    Case(CROSS, 16, 3, 2, 17, "padding", previous=False, batch=1),
    Case(CROSS, 9, 3, 3, 5, "", previous=False, width=70),
]
LONG = [  # more than one block of columns: of the convolution (64 and 128), of the softmax (2048 / heads)
    Case(ENCODER, 9, 3, 1, 140, "padding", batch=1),
    Case(CROSS, 2, 5, 2, 133, "rows", HALF, previous=False, batch=1),
    Case(ENCODER, 16, 3, 3, 259, "padding", BFLOAT, batch=1),
]


def name(case):
    parts = (case.geometry.name, case.heads, f"k{case.k}", f"{case.length}x{case.columns}", case.masks or "open")
    return "-".join(map(str, [*parts, str(case.dtype)[6:]])).replace(" ", "_")


@pytest.mark.parametrize("case", [*CASES, LONG[0]], ids=name)
def test_as_plain(case):
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", LONG[1:], ids=name)
def test_as_plain_in_several_blocks(case):
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("heads", range(1, 17))
def test_as_plain_for_every_count_of_heads(heads):
    geometry = list(Geometry)[heads % 3]
    dtype = (SINGLE, HALF, BFLOAT, SINGLE)[heads % 4]
    check(
        Case(geometry, heads, 3, 5, 5 if geometry != CROSS else 7, "padding rows", dtype, previous=geometry == ENCODER)
    )


@pytest.mark.parametrize(
    "case", [Case(masks="padding rows", beta=0), Case(CROSS, masks="rows all", beta=0, dtype=HALF)]
)
def test_without_convolution(case):
    check(case)
    check(case._replace(previous=False))


def test_only_the_map_or_only_the_context_matters():
    case = Case(length=2, masks="padding rows")
    tensors, evolution = tensors_of(case), evolution_of(case)
    hidden, masked = masks_of(case)
    for number in (0, 1):
        fast, slow = (
            torch.autograd.grad(
                (run(*tensors[:3], evolution, hidden, masked, tensors[3])[number] ** 2).sum(),
                [*tensors, *evolution.parameters()],
                allow_unused=True,
                materialize_grads=True,
            )
            for run in (kernel, plain)
        )
        for mine, true in zip(fast, slow, strict=True):
            torch.testing.assert_close(mine, true, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("columns", [6, 16])
def test_two_layers(columns):
    """The map of the first goes to the second, and the gradient of the map back."""
    case = Case(length=3, columns=columns, masks="padding rows", heads=2)
    first, second = evolution_of(case), evolution_of(case)
    one, two = tensors_of(case), tensors_of(case)
    hidden, masked = masks_of(case)
    inputs = [*one[:3], *two[:3], *first.parameters(), *second.parameters()]
    gradients = []
    for run in (kernel, plain):
        context, previous = run(*one[:3], first, hidden, masked)
        after, last = run(*two[:3], second, hidden, masked, previous)
        gradients.append(torch.autograd.grad((context * probe(context)).sum() + (after**2).sum() + last.sum(), inputs))
    for mine, true in zip(*gradients, strict=True):
        assert (mine - true).abs().max() <= 1e-5 * true.abs().max()


def test_rows_that_are_all_masked_are_uniform():
    case = Case(masks="all", width=6, columns=6)
    q, k, _, previous = tensors_of(case)
    hidden, masked = masks_of(case)
    eye = torch.eye(6, device=DEVICE).expand(2, 3, 6, 6)
    probs, _ = kernel(q, k, eye, evolution_of(case), hidden, masked, previous)
    torch.testing.assert_close(probs[-1, :, 1], torch.full((3, 6), 1 / 6, device=DEVICE))


def test_removed_taps_have_no_effect_and_no_gradient():
    case = Case(DECODER, 2, 3, 4, 4, "future", previous=False)
    tensors, evolution = tensors_of(case), evolution_of(case)
    upper = torch.ones(3, 3, device=DEVICE).triu(1).bool().expand_as(evolution.conv.weight)
    with torch.no_grad():
        evolution.conv.weight[upper] = torch.nan
    for result in results(kernel, tensors, evolution, *masks_of(case)):
        assert result.isfinite().all()
    weight_gradient = results(kernel, tensors, evolution, *masks_of(case))[-2]
    assert (weight_gradient[upper] == 0).all()
    assert (weight_gradient[~upper] != 0).all()


def test_what_lies_beside_a_map_in_memory_does_not_matter():
    case = Case(columns=5, length=2)
    tensors, evolution = tensors_of(case), evolution_of(case)
    expected = results(kernel, tensors, evolution, None, None)
    for beyond in (11, 3):  # the pitch of the kernels' own maps, and another
        wide = F.pad(tensors[3].detach(), (0, beyond), value=torch.nan)
        tensors[3] = wide[..., :5].requires_grad_()
        for mine, true in zip(results(kernel, tensors, evolution, None, None), expected, strict=True):
            assert mine.equal(true)


def test_what_is_not_finite_shows():
    """Mixed precision finds a loss scale that is too high by it."""
    case = Case(previous=False)
    q, k, v, _ = tensors_of(case)
    with torch.no_grad():
        q[1, 2, 3] = torch.inf
    context, _ = kernel(q, k, v, evolution_of(case))
    assert not context[1, :, 3:4].isfinite().any()
    assert context[0].isfinite().all()


# ---- dropout


def probabilities(case, dropout, seed):
    """P after dropout, B x K x T x S: the context of values that are the unit vectors."""
    torch.manual_seed(1)
    q, k, _, _ = tensors_of(case)
    evolution = evolution_of(case)
    eye = torch.eye(case.columns, device=DEVICE).expand(case.batch, case.heads, -1, -1)
    torch.manual_seed(seed)
    return kernel(q, k, eye, evolution, dropout=dropout)[0].detach()


def test_dropout_keeps_its_share_and_the_expectation():
    case = Case(ENCODER, 10, 1, 16, 16, previous=False)
    without = probabilities(case, 0.0, seed=1)
    after = probabilities(case, 0.3, seed=1)
    keep = (after / without).round(decimals=3)
    assert keep.unique().tolist() == [0, pytest.approx(1 / 0.7, abs=1e-3)]
    kept = (keep > 0).double()
    spread = (0.3 * 0.7 / kept.numel()) ** 0.5
    assert abs(kept.mean() - 0.7) < 4 * spread
    assert abs((after.sum(-1) - 1).mean()) < 0.02
    # heads, sentences, rows and columns each draw their own: no two are alike
    for axis in range(4):
        slices = kept.movedim(axis, 0).flatten(1)
        alike = torch.corrcoef(slices).fill_diagonal_(0).abs().max()
        assert alike < 6 / slices.size(1) ** 0.5, f"axis {axis}"


def test_dropout_follows_the_seed():
    case = Case(previous=False)
    assert probabilities(case, 0.5, seed=3).equal(probabilities(case, 0.5, seed=3))
    assert not probabilities(case, 0.5, seed=3).equal(probabilities(case, 0.5, seed=4))
    assert (probabilities(case, 1.0, seed=3) == 0).all()


@pytest.mark.parametrize("beta", [0, 0.3])
def test_gradients_are_of_the_mask_that_the_forward_pass_drew(beta):
    case = Case(masks="padding", columns=6, width=6, beta=beta)
    tensors, evolution = tensors_of(case), evolution_of(case)
    masks = masks_of(case)
    q, k, _, previous = tensors
    eye = torch.eye(6, device=DEVICE).expand(2, 3, 6, 6)
    torch.manual_seed(5)
    after = kernel(q, k, eye, evolution, *masks, previous, dropout=0.4)[0]
    without = kernel(q, k, eye, evolution, *masks, previous)[0]
    keep = torch.where(without > 0, after / without, 1).detach()

    def dropped(*arguments):
        torch.manual_seed(5)
        return kernel(*arguments, dropout=0.4)

    ours = results(dropped, tensors, evolution, *masks)
    theirs = results(lambda *arguments: plain(*arguments, keep=keep), tensors, evolution, *masks)
    for mine, true in zip(ours, theirs, strict=True):
        assert (mine - true).abs().max() <= 1e-5 * true.abs().max()


# ---- promises about runs


def test_twice_the_same_bits():
    case = Case(masks="padding rows", dtype=HALF)
    tensors, evolution = tensors_of(case), evolution_of(case)
    once, again = (results(kernel, tensors, evolution, *masks_of(case)) for _ in range(2))
    for first, second in zip(once, again, strict=True):
        assert first.equal(second)


def test_checkpointed_layers_drop_the_same():
    case = Case(length=2, masks="padding rows")
    tensors, evolution = tensors_of(case), evolution_of(case)

    def layer(*arguments):
        return kernel(*arguments, dropout=0.4)

    def checkpointed(*arguments):
        return torch.utils.checkpoint.checkpoint(layer, *arguments, use_reentrant=False)

    gradients = []
    for run in (layer, checkpointed):
        torch.manual_seed(7)
        gradients.append(results(run, tensors, evolution, *masks_of(case)))
    for first, second in zip(*gradients, strict=True):
        assert first.equal(second)


def test_one_map_is_kept_for_the_backward_pass(monkeypatch):
    case = Case(masks="padding")
    q, k, v, previous = tensors_of(case)
    made, new_maps = [], kernels.new_maps

    def counted(*arguments):
        maps = new_maps(*arguments)
        made.append(StorageWeakRef(maps.untyped_storage()))
        return maps

    monkeypatch.setattr(kernels, "new_maps", counted)
    result = kernel(q, k, v, evolution_of(case), *masks_of(case), previous, keep_map=False)  # noqa: F841  (holds the graph)
    assert len(made) >= 3
    gc.collect()  # the interpreter leaves cycles
    assert sum(not maps.expired() for maps in made) == 1


@pytest.mark.parametrize("train", [True, False])
def test_in_a_model(monkeypatch, train):
    """All three kinds take the kernels, but for layers that are asked for weights: the last one's, in training."""
    assert gpu.unavailable(torch.ones(1, 1, 1, 1, device=DEVICE)) is None  # tries them once, which is not to count
    calls, evolving_attention = [], gpu.evolving_attention
    monkeypatch.setattr(gpu, "evolving_attention", lambda *a, **k: calls.append(1) or evolving_attention(*a, **k))
    monkeypatch.setattr(cpu, "runs", lambda q: False)
    gradients = []
    for flags in ([], ["--ea-plain"]):
        torch.manual_seed(1)
        model = build("ea_transformer_base", *flags, train=train).to(DEVICE)
        source, target = batch([5, 3], left_pad=True).to(DEVICE), batch([4, 6], eos_first=True).to(DEVICE)
        output, _ = model(source, None, target)
        gradients.append([output, *torch.autograd.grad(output.square().mean(), list(model.parameters()))])
    assert len(calls) == 3 + 2 + (1 if train else 0)
    for ours, plain in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-3, atol=1e-4)


def test_float32_weights_among_half_tensors():
    """As under --amp: the numbers are those of weights in half precision, the gradients are float32."""
    evolution = Evolution(ENCODER, 4)
    q, k, v = (torch.randn(2, 4, 5, 8, device=DEVICE, dtype=HALF) for _ in range(3))
    outputs, gradients = [], []
    for weights in (evolution.to(DEVICE), deepcopy(evolution).to(DEVICE, HALF)):
        context, _ = gpu.evolving_attention(q, k, v, weights)
        outputs.append(context)
        gradients.append(torch.autograd.grad(context.float().square().sum(), list(weights.parameters())))
    assert torch.equal(*outputs)
    assert {gradient.dtype for gradient in gradients[0]} == {SINGLE}
    for ours, half in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, half.float())


def test_says_why_it_cannot_run(monkeypatch):
    assert "float64" in gpu.unavailable(torch.zeros(1, 1, 1, 1, dtype=DOUBLE, device=DEVICE))
    assert "16 heads" in gpu.unavailable(torch.zeros(1, 17, 1, 1, device=DEVICE))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "GPU" in gpu.unavailable(torch.zeros(1, 1, 1, 1))


# ---- the compiler

#: (heads, k, type, geometry, T, S, D) and what is unusual; no registers may spill in the first ones
COMPILED = [
    (8, 3, HALF, ENCODER, 256, 256, 64, {}),
    (8, 3, SINGLE, ENCODER, 250, 250, 64, {}),
    (8, 3, BFLOAT, CROSS, 30, 33, 64, {"previous": False}),
    (4, 3, HALF, DECODER, 30, 30, 40, {"previous": False}),
    (4, 3, SINGLE, ENCODER, 60, 60, 40, {}),
    (4, 3, BFLOAT, ENCODER, 250, 250, 40, {"dropout": 0.0}),
]
UNUSUAL = [
    (1, 1, HALF, ENCODER, 1, 1, 1, {}),
    (16, 5, SINGLE, CROSS, 100, 130, 64, {"previous": False}),
    (16, 3, BFLOAT, DECODER, 40, 40, 64, {"previous": False}),
    (5, 3, HALF, ENCODER, 1, 20, 256, {"convolved": False}),
]


def compiled(capability, heads, k, dtype, geometry, length, columns, width, options):
    """Registers and bytes of stack of each kernel as the launchers call it, compiled for a GPU that is not there."""
    import triton
    from triton.backends.compiler import GPUTarget

    from ea_fairseq import gpu_kernels as kernels

    class NoGPU:
        def get_current_target(self):
            return GPUTarget("cuda", capability, 32)

        def get_current_device(self):
            return 0

        def get_current_stream(self, device=None):
            return 0

    class Compiler:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            return lambda *given, **constants: found.append(self.kernel.warmup(*given, grid=grid, **constants))

    found = []
    triton.runtime.driver.set_active(NoGPU())
    names = [name for name in vars(kernels) if name.endswith("_kernel")]
    originals = {name: getattr(kernels, name) for name in names}
    for name in names:
        setattr(kernels, name, Compiler(originals[name]))
    launch(kernels, heads, k, dtype, geometry, length, columns, width, **options)
    for name in names:
        setattr(kernels, name, originals[name])
    return {kernel.metadata.name: resources(triton, kernel.asm["cubin"]) for kernel in found}


def launch(kernels, heads, k, dtype, geometry, length, columns, width, previous=True, dropout=0.1, convolved=True):
    """The launchers one after the other, on numbers that mean nothing."""
    split = torch.zeros(max(length, columns), 2, heads, width, dtype=dtype).permute(1, 2, 0, 3)
    q, keys = split[:, :, :length], split[:, :, :columns]
    maps = kernels.new_maps(q, columns)
    hidden = torch.zeros(2, 1, length, columns, dtype=torch.bool)
    weight = torch.zeros(heads, heads, k, k, dtype=dtype) if convolved else None
    bias = torch.zeros(heads, dtype=dtype) if convolved else None
    taps, drop = kernels.Taps.of(geometry, k), kernels.Dropout.of(dropout)
    kernels.mix(q, keys, maps if previous else None, hidden, 0.5)
    evolved = kernels.evolve(maps, weight, bias, hidden[:, :, :1], taps, 0.1, drop)
    grad_map = maps if previous else None
    _, grad_conv, _ = kernels.soften_backward(evolved, hidden, hidden, grad_map, maps, previous, 0.5, 0.1, drop)
    if convolved:
        kernels.convolve_backward(maps, weight, hidden, grad_conv, maps, previous, 0.5, taps)


def resources(triton, cubin):
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True).stdout
    return {key: int(value) for key, value in re.findall(r"(REG|STACK):(\d+)", text)}


@pytest.mark.slow
def test_compiles_for_an_H100(tmp_path):
    """In a process of its own: Triton here was imported for its interpreter."""
    if not (Path(kernels.triton.__file__).parent / "backends/nvidia/bin/cuobjdump").exists():
        pytest.skip("this Triton has no compiler for NVIDIA")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, __file__, "90"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(reports) == len(COMPILED) + len(UNUSUAL)
    for case, report in zip(COMPILED, reports, strict=False):
        assert len(report) == 4, report
        for kernel_name, used in report.items():
            assert used["STACK"] == 0, f"{kernel_name} spills for {case}: {used}"


if __name__ == "__main__":
    for case in [*COMPILED, *UNUSUAL]:
        print(json.dumps(compiled(int(sys.argv[1]) if len(sys.argv) > 1 else 90, *case)), flush=True)
