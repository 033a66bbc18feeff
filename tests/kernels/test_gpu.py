"""The GPU kernels give the numbers of the plain composition, forward and every gradient, or refuse.

Without a GPU they run in Triton's interpreter, which shows their numbers; ``test_compiles_without_spills`` shows that
the compiler takes them. As a program, with PYTHONPATH=.:tests, this file compiles them (``test_gpu.py 90``) and
prints the registers that they need.
"""

import functools
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from helpers import attentions, promises, warm
from helpers.attentions import (
    call_of,
    case_id,
    check_dropout,
    check_each_result,
    check_share,
    check_steps,
    close,
    compare,
    plain,
    probe,
    problem,
    results,
)
from helpers.interpreter import import_kernels, interpret_quickly
from helpers.models import amplify_, batch, build

from evolving_attention.evolution import Geometry
from evolving_attention.functional import attend
from evolving_attention.kernels import cpu, gpu, kernel_for
from evolving_attention.kernels.operation import Gradients

ENCODER, DECODER, CROSS = Geometry
HALF, BFLOAT, SINGLE, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


if __name__ != "__main__":
    kernels, operation, trial = import_kernels()


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch):
    monkeypatch.setattr(trial, "_verdicts", {})
    gpu._kernels.cache_clear()  # other tests may have asked for it without the interpreter
    gpu._say_once.cache_clear()
    if DEVICE == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        round_as_gpus_do(monkeypatch)
        interpret_quickly(monkeypatch)
    yield
    gpu._kernels.cache_clear()


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


Case = functools.partial(attentions.Case, device=DEVICE)


def kernel(evolution, tensors, masks, **options):
    """Context, A_logit and weights by the kernels."""
    return gpu.attend(call_of(evolution, tensors, masks, **options))[:3]


#: each geometry, size of kernel, type, rule and mask with most of the others
CASES = [
    Case(ENCODER, 4, 3, 4, 4, "padding rows"),
    Case(ENCODER, 1, 1, 1, 1, "", previous=False),
    Case(ENCODER, 8, 3, 3, 3, "padding rows all", BFLOAT, batch=1, width=8),
    Case(ENCODER, 2, 5, 5, 6, "rows", HALF, batch=1),
    Case(DECODER, 4, 3, 5, 5, "future padding rows", previous=False),
    Case(DECODER, 3, 5, 5, 5, "future", HALF, previous=False, batch=1),
    Case(DECODER, 3, 3, 2, 2, "future all", BFLOAT, previous=False, width=40, batch=1),
    Case(CROSS, 4, 3, 3, 9, "padding", HALF, previous=False),
    Case(CROSS, 16, 3, 2, 17, "padding", previous=False, batch=1),
    Case(ENCODER, 4, 3, 3, 5, "padding rows all", rule="predictive"),
    Case(ENCODER, 1, 5, 4, 4, "rows", HALF, rule="predictive", given=True, batch=1),
    Case(ENCODER, 8, 1, 3, 5, "padding rows", BFLOAT, rule="realformer", given=True, batch=1),
    Case(DECODER, 2, 3, 4, 4, "future padding", previous=False, given=True, batch=1),
    Case(ENCODER, 2, 3, 3, 4, "padding rows", beta=0.0, batch=1),
    Case(ENCODER, 4, 3, 3, 5, "padding rows", learn=True),
    Case(ENCODER, 2, 1, 3, 3, "rows", rule="predictive", learn=True, alpha=0.0, given=True, batch=1),
    Case(ENCODER, 4, 1, 3, 5, "padding rows", rule="residual", learn=True),
    Case(DECODER, 2, 3, 4, 4, "future", rule=(0.6, 0.5, 0.3, 0.2, 0.9), learn=True, batch=1),
    Case(ENCODER, 2, 3, 3, 4, "padding rows", HALF, rule=(0.6, 0.5, 0.3, 0.2, 0.9), learn=True, given=True, batch=1),
]
#: more than one band of rows, block of columns, tile of pixels, and program for each
LONG = [
    Case(ENCODER, 3, 3, 20, 30, "padding rows", batch=1, width=72),
    Case(CROSS, 2, 3, 1, 70, "padding", previous=False, batch=2, learn=True),
    Case(ENCODER, 2, 5, 19, 40, "padding", HALF, batch=1),
    Case(DECODER, 2, 3, 35, 35, "future", previous=False, learn=True, batch=1),
    Case(CROSS, 2, 3, 34, 4, "", BFLOAT, previous=False, rule=(0.6, 0.5, 0.3, 0.2, 0.9), batch=1),
]


@pytest.mark.parametrize("case", CASES + [pytest.param(case, marks=pytest.mark.slow) for case in LONG], ids=case_id)
def test_as_plain(case):
    compare(problem(case), kernel)


def test_only_one_of_the_results_matters():
    check_each_result(problem(Case(length=2, masks="padding rows", learn=True)), kernel)


@pytest.mark.parametrize("learn", [False, True])
def test_removed_taps_have_no_effect_and_no_gradient(learn):
    case = Case(DECODER, 2, 3, 4, 4, "future", previous=False, learn=learn)
    evolution, tensors, masks = problem(case)
    upper = torch.ones(3, 3, device=DEVICE).triu(1).bool().expand_as(evolution.conv.weight)
    with torch.no_grad():
        evolution.conv.weight[upper] = torch.nan
    found = results(kernel, evolution, tensors, masks)
    assert all(result.isfinite().all() for result in found.values())
    assert (found["gradient of conv.weight"][upper] == 0).all()


def test_what_has_no_share_is_not_read():
    """As in the plain composition, where infinities in it do no harm; it gets no gradient."""
    case = Case(rule="residual", alpha=0.0)
    evolution, tensors, masks = problem(case)
    with torch.no_grad():
        tensors["previous"].fill_(torch.inf)
    found = results(kernel, evolution, tensors, masks)
    assert "gradient of previous" not in found
    close(found, results(plain, evolution, tensors, masks))


def test_what_is_not_finite_shows():
    """Mixed precision needs infinities to find a loss scale that is too high."""
    given = problem(Case(previous=False))
    with torch.no_grad():
        given.tensors["q"][1, 2, 3] = torch.inf
    context, *_ = kernel(*given)
    assert not context[1, :, 3:4].isfinite().any()
    assert context[0].isfinite().all()


def test_float16_stays_finite():
    """A_logit is kept within half of the range; where it is cut off no gradient flows, as of torch.clamp."""
    given = problem(Case(ENCODER, 2, 3, 3, 4, "", HALF, rule=(0.0, 1.0, 0.5, 1.9, 1.0), batch=1))
    with torch.no_grad():
        given.tensors["previous"][0, 0, 0, 0] = 60000
    a_logit = gpu.attend(given.call()).a_logit
    assert a_logit[0, 0, 0, 0] == torch.finfo(HALF).max / 2
    (gradient,) = torch.autograd.grad(a_logit.sum(), given.tensors["previous"])
    assert gradient[0, 0, 0, 0] == 0
    assert gradient[0, 0, 0, 1] != 0


def test_logits_beyond_float16_are_cut_off_before_they_are_mixed():
    given = problem(Case(ENCODER, 2, 3, 3, 4, "", HALF, batch=1))
    with torch.no_grad():
        for name in "qk":
            given.tensors[name][0, 0, 0] = 300
        given.evolution.conv.weight *= 0.01
    call = given.call()
    found, expected = gpu.attend(call).a_logit, attend(call, given.evolution, plain=True).a_logit
    assert expected.isfinite().all() and (expected.abs() > 1e4).any()
    torch.testing.assert_close(found, expected, rtol=0.01, atol=1)


def test_learnt_shares_may_stay_float32_among_half_tensors():
    """As under --amp: the numbers are those of shares in half precision, the gradients are float32."""
    case = Case(ENCODER, 2, 3, 3, 4, "padding rows", HALF, alpha=0.5, beta=0.25, learn=True)
    evolution, tensors, masks = problem(case)
    half = results(kernel, evolution, tensors, masks)
    evolution.alpha, evolution.beta = (
        torch.nn.Parameter(x.detach().float()) for x in (evolution.alpha, evolution.beta)
    )
    single = results(kernel, evolution, tensors, masks)
    for share in ("gradient of alpha", "gradient of beta"):
        assert single[share].dtype == SINGLE
        torch.testing.assert_close(single.pop(share).half(), half.pop(share), rtol=1e-2, atol=1e-2)
    assert all(single[name].equal(half[name]) for name in half)


# ---- dropout


def test_dropout_keeps_the_right_share_everywhere():
    check_share(Case(ENCODER, 10, 1, 16, 16, previous=False, width=16), gpu.attend, 0.3)


def test_dropout_of_everything_gives_zeros():
    found = results(kernel, *problem(Case(length=2, masks="padding")), dropout=1.0)
    assert (found["context"] == 0).all()
    assert (found["gradient of v"] == 0).all()
    assert all(x.isfinite().all() for x in found.values())
    torch.testing.assert_close(found["weights"].sum(-1), torch.ones(2, 3, 2, device=DEVICE))  # before dropout


@pytest.mark.parametrize("beta", [0, 0.3])
def test_dropout_drops_the_same_forward_and_backward(beta):
    check_dropout(problem(Case(masks="padding", columns=6, width=6, beta=beta)), kernel, 0.4)


# ---- step by step

#: a case, its rows in one step, and the hypotheses of a sentence
STEPS = [
    (Case(DECODER, 3, 3, 4, 4, "future padding"), 1, 1),
    (Case(DECODER, 2, 5, 4, 4, "future", HALF, previous=False, rule=(0.0, 1.0, 0.3, 0.0, 0.9)), 2, 1),
    (Case(CROSS, 4, 3, 3, 7, "padding", batch=4), 1, 2),
    (Case(CROSS, 1, 3, 4, 70, "padding", BFLOAT, previous=False), 2, 2),
    (Case(CROSS, 2, 3, 1, 130, previous=False), 1, 1),
]


@pytest.mark.parametrize(("case", "at_once", "beams"), STEPS, ids=[case_id(case) for case, _, _ in STEPS])
def test_steps_are_the_rows_of_the_whole(case, at_once, beams):
    check_steps(case, gpu.attend, at_once, beams)


@pytest.mark.slow
@torch.no_grad()
def test_steps_of_a_model(monkeypatch):
    """While beams move; each step of an attention is three launches."""
    monkeypatch.setattr(trial, "passed", lambda variant: True)
    monkeypatch.setattr(cpu, "refuses", lambda call: "not wanted here")
    launches, launch = [], operation._run
    monkeypatch.setattr(operation, "_run", lambda *arguments: launches.extend(arguments[2]) or launch(*arguments))
    model = amplify_(build("ea_transformer_base", "--encoder-layers", 1, "--decoder-layers", 1).to(DEVICE))
    model.decoder.graphs = False
    promises.check_steps(model, batch([4, 2]).to(DEVICE), steps=3, dropped=(1,))
    assert len(launches) == 3 * (1 + 2 * 3 * 2), "the encoder's, and both in each step and with teacher forcing"


# ---- promises about runs


def test_twice_the_same_bits():
    case = Case(masks="padding rows", dtype=HALF, learn=True)
    evolution, tensors, masks = problem(case)
    once, again = (results(kernel, evolution, tensors, masks) for _ in range(2))
    assert all(once[name].equal(again[name]) for name in once)


def test_no_map_is_kept_for_the_backward_pass():
    """But for the inputs, which others keep anyway."""
    given, saved = problem(Case(masks="padding")), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        gpu.attend(given.call(need_weights=False))
    maps = [x for x in saved if x is not None and x.shape == (2, 3, 5, 6)]
    assert [x.data_ptr() for x in maps] == [given.tensors["previous"].data_ptr()]


def test_saved_tensors_may_come_back_in_another_layout():
    """As with torch.autograd.graph.save_on_cpu(pin_memory=True)."""
    case = Case(length=2, masks="padding rows")
    given = problem(case)
    expected = results(kernel, *given)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: None if x is None else x.contiguous()):
        close(results(kernel, *given), expected)


def test_later_launches_give_addresses(monkeypatch):
    """In the places of the tensors, which the first launch gives to the compiler."""
    compiled, launched = [], []

    class Kernel:
        def warmup(self, *arguments, **_):
            compiled.append(arguments)
            return {(7, 1, 1): lambda *arguments: launched.append(arguments)}

    monkeypatch.setattr(operation, "INTERPRETED", False)
    kernel, tensors = Kernel(), (torch.ones(2), torch.ones(1, dtype=torch.bool), torch.ones(3))
    for _ in range(2):
        operation._run(kernel, tensors, [((7, 1, 1), (0.5,), (3,))], (SINGLE,))
    assert compiled == [(*tensors, 0.5, 3)]
    assert launched == [(*(x.data_ptr() for x in tensors), 0.5, 3)] * 2


# ---- the dispatcher


@pytest.mark.slow
def test_compile_and_export_keep_the_kernels(monkeypatch):
    monkeypatch.setattr(trial, "find_difference", lambda variant: "")
    monkeypatch.setattr(cpu, "refuses", lambda call: "not wanted here")
    case = Case(ENCODER, 2, 3, 3, 4, "padding rows", learn=True, width=8)
    evolution, tensors, masks = problem(case)

    def attention(q, k, v, previous):
        own = {"q": q, "k": k, "v": v, "previous": previous}
        return attend(call_of(evolution, own, masks, need_weights=False, dropout=0.5))[:2]

    def gradients(run):
        torch.manual_seed(2)
        outputs = run(*tensors.values())
        return [*outputs, *torch.autograd.grad(sum((x * probe(x)).sum() for x in outputs), list(tensors.values()))]

    compiled = torch.compile(attention, fullgraph=True, options={"fallback_random": True})
    for mine, true in zip(gradients(compiled), gradients(attention), strict=True):
        torch.testing.assert_close(mine, true)

    class Module(torch.nn.Module):
        def forward(self, *vectors):
            return attention(*vectors)

    exported = torch.export.export(Module(), tuple(tensors.values()))
    assert "evolving_attention.gpu.default" in str(exported.graph)


def test_the_operation_is_declared_rightly():
    case = Case(ENCODER, 2, 3, 3, 4, "padding rows")
    call = problem(case).call().reduced()
    arguments = call._replace(coefficients=list(call.coefficients), geometry=call.geometry.value)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.evolving_attention.gpu.default, arguments, test_utils=checks)


# ---- refusals


def small_call(**options):
    """The quickest call: one head, k = 1, a sentence of two words."""
    case = Case(heads=1, k=1, length=2, columns=2, dtype=options.pop("dtype", SINGLE), previous=False, batch=1, width=1)
    return problem(case).call(**{"keep_map": False, "need_weights": False, **options})


def test_refuses_what_it_does_not_know(monkeypatch, caplog):
    """It says once why more heads are refused."""
    tried = []
    monkeypatch.setattr(trial, "passed", lambda variant: tried.append(variant) or True)
    call = small_call()
    assert gpu.refuses(call) is None
    assert len(tried) == 1
    many, wide = torch.zeros(1, 17, 2, 1, device=DEVICE), torch.zeros(1, 1, 2, 129, device=DEVICE)
    refused = [
        small_call(dtype=DOUBLE),
        call._replace(q=many, k=many, v=many),
        call._replace(q=wide, k=wide, v=wide),
    ]
    assert all(map(gpu.refuses, 2 * refused))
    (line,) = caplog.messages
    assert "16 heads" in line and "has 17" in line
    assert kernel_for(call._replace(v=wide[..., :2])) is None
    assert len(tried) == 1
    if DEVICE == "cpu":
        monkeypatch.delenv("TRITON_INTERPRET")
        assert gpu.refuses(call)


def test_says_why_it_cannot_run(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "evolving_attention.kernels.gpu.operation", None)
    monkeypatch.delattr(gpu, "operation", raising=False)
    with caplog.at_level(logging.WARNING):
        assert gpu.refuses(small_call())
        assert gpu.refuses(small_call())
    (line,) = caplog.messages
    assert "slower PyTorch operations on the GPU" in line
    assert "kernels.gpu.operation" in line


def test_triton_is_imported_only_when_it_is_needed():
    program = """
import sys, torch
from evolving_attention import kernels
from evolving_attention.call import Call
one = torch.ones(1, 1, 1, 1)
call = Call(one, one, one)
assert kernels.gpu.refuses(call)
kernels.kernel_for(call)
assert "evolving_attention.kernels.gpu" in sys.modules
assert "evolving_attention.kernels.gpu.operation" not in sys.modules
"""
    environment = dict(os.environ)
    environment.pop("TRITON_INTERPRET", None)
    done = warm.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ---- the trial


@pytest.fixture
def small_trial(monkeypatch):
    """The trial's problems at their smallest: the interpreter is slow."""
    monkeypatch.setattr(trial, "SIZE", (3, 4))


def variant(**options):
    plain = {"dtype": SINGLE, "heads": 2, "kernel_size": 3, "width": 16, "unit": 8}
    return trial.Variant(torch.device(DEVICE), **{**plain, **options})


@pytest.mark.parametrize(
    "options",
    [{"dtype": BFLOAT}, {"dtype": HALF, "kernel_size": 5, "unit": 1}, {"kernel_size": 0}],
    ids=["bfloat16", "float16", "none"],
)
def test_trial_passes_what_is_right(small_trial, options):
    """With room to spare: on another device rounding differs."""
    tried = variant(**options)
    errors = trial.errors(tried)
    assert {
        "context",
        "the gradient of given",
        "the gradient of q of constant shares",
        "context of steps",
    } <= errors.keys()
    assert max(errors.values()) < trial.TOLERANCE[tried.dtype] / 1.5


@pytest.mark.parametrize(("function", "index"), [("forward", 0), ("forward", 1), ("backward", 0), ("backward", 5)])
def test_trial_finds_a_kernel_that_is_wrong(monkeypatch, small_trial, caplog, function, index):
    right = getattr(operation.operation, function)

    def wrong(*arguments):
        found = right(*arguments)
        found[index].mul_(1.25)
        return found

    monkeypatch.setattr(operation.operation, function, wrong)
    tried = variant(heads=1, kernel_size=1)
    assert not trial.passed(tried)
    assert not trial.passed(tried)
    (line,) = caplog.messages
    assert "differs from the plain composition's by" in line
    assert "kernel_size=1" in line


def test_trial_finds_other_dropout_on_the_way_back(monkeypatch, small_trial):
    right = operation.operation.backward

    def wrong(of, x):
        return right(of, x._replace(seed=None if x.seed is None else x.seed + 1))

    monkeypatch.setattr(operation.operation, "backward", wrong)
    assert trial.find_difference(variant(heads=1, kernel_size=1)).startswith("dropout in the backward pass")


def test_sizes_that_get_other_machine_code_are_tried_by_themselves(monkeypatch):
    tried = []
    monkeypatch.setattr(trial, "find_difference", lambda variant: tried.append(variant) or "")
    call, mask = small_call(), torch.zeros(1, 1, 2, 2, device=DEVICE, dtype=torch.bool)
    same = [
        call,
        call._replace(geometry=DECODER, need_weights=True, keep_map=True, hidden=mask, masked=mask),
        call._replace(given=torch.zeros(1, 1, 2, 2, device=DEVICE), dropout=0.1),
        call._replace(previous=torch.zeros(1, 1, 2, 2, device=DEVICE), coefficients=call.coefficients._replace(d=1.0)),
    ]
    others = [
        small_call(dtype=HALF),
        call._replace(weight=None, bias=None),
    ]
    for _ in range(2):
        assert not any(gpu.refuses(call) for call in [*same, *others])
    assert len(tried) == 1 + len(others)
    with torch.no_grad():
        assert gpu.refuses(call) is None
    assert len(tried) == 1 + len(others)


def test_an_error_in_a_trial_is_a_verdict(monkeypatch, caplog):
    def short(variant):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(trial, "find_difference", short)
    assert not trial.passed(variant())
    (line,) = caplog.messages
    assert "out of memory" in line


def test_no_trial_while_a_graph_is_captured(monkeypatch):
    """A variant that a capture meets before its trial is remembered."""
    monkeypatch.setattr(trial, "find_difference", lambda variant: "")
    monkeypatch.setattr(trial, "untried", [])
    for capturing, verdict in ((True, False), (False, True), (True, True)):
        monkeypatch.setattr(trial, "_capturing", lambda device, capturing=capturing: capturing)
        assert trial.passed(variant()) == verdict
    assert len(trial.untried) == 1


def test_trial_leaves_the_caller_as_he_was(small_trial):
    """Random numbers, modes, and hooks that count saved tensors stay as they were."""
    saved = []
    torch.manual_seed(1)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x), torch.inference_mode():
        assert trial.passed(variant(heads=1, kernel_size=1))
        assert torch.is_inference_mode_enabled()
    assert not saved
    after = torch.rand(3)
    torch.manual_seed(1)
    assert torch.rand(3).equal(after)


# ---- the compiler

Compiled = functools.partial(attentions.Case, length=30, columns=30, previous=False)
#: in each the machine code of no phase spills more than eight numbers
COMPILED = [
    Compiled(heads=4, width=40, dtype=HALF),
    Compiled(heads=8, width=64, dtype=HALF),
    Compiled(heads=16, k=5, width=128, dtype=HALF),
    Compiled(heads=4, width=40, dtype=BFLOAT, beta=0.0),
]
#: these may
UNUSUAL = [Compiled(heads=4, width=40)]


def without_gpu(capability):
    """Triton's driver for a GPU that is not there."""
    import triton
    from triton.backends.compiler import GPUTarget

    class NoGPU:
        def get_current_target(self):
            return GPUTarget("cuda", capability, 32)

        def get_current_device(self):
            return 0

        def get_current_stream(self, device=None):
            return 0

    triton.runtime.driver.set_active(NoGPU())


def compiled(capability, case):
    """Registers and bytes of stack and shared memory of each kernel, compiled for a GPU that is not there."""
    import triton

    from evolving_attention.kernels.gpu import operation

    def compile_only(kernel, tensors, launches, types):
        for grid, numbers, constants in launches:
            made = kernel.warmup(*tensors, *numbers, *constants, grid=grid, **operation.OPTIONS)
            used[f"{kernel.__name__} {constants[-1]}"] = {
                **resources(triton, made.asm["cubin"]),
                "SHARED": made.metadata.shared,
            }

    used = {}
    without_gpu(capability)
    operation._run = compile_only
    inputs = problem(case).call(need_weights=False).reduced()
    context, a_logit, _, _, stats = operation.forward(inputs)
    operation.backward(Gradients(context, a_logit, None, context, stats, None, [True] * 8), inputs)
    return used


def resources(triton, cubin):
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True).stdout
    return {key: int(value) for key, value in re.findall(r"(REG|STACK):(\d+)", text)}


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100])
def test_compiles_without_spills(capability):
    """Run in another process: Triton here was imported for its interpreter.

    Triton's cache keeps the result: a second run takes a moment.
    """
    if not (Path(kernels.triton.__file__).parent / "backends/nvidia/bin/cuobjdump").exists():
        pytest.skip("this Triton has no compiler for NVIDIA")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    cases = [*COMPILED, *UNUSUAL] if capability == 90 else COMPILED[:1]
    command = [sys.executable, __file__, str(capability), str(len(cases))]
    done = warm.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(reports) == len(cases)
    for case, report in zip(cases, reports, strict=True):
        assert len(report) == (7 if case.beta else 6), report
        for kernel_name, used in report.items():
            assert used["SHARED"] <= 99 * 1024, f"{kernel_name} of {case} does not fit into an RTX 3090 or 4090: {used}"
            assert used["STACK"] <= 32 or case in UNUSUAL, f"{kernel_name} spills for {case}: {used}"


if __name__ == "__main__":  # test_gpu.py CAPABILITY [CASES]
    for case in [*COMPILED, *UNUSUAL][: int((*sys.argv[2:], 99)[0])]:
        print(json.dumps(compiled(int(sys.argv[1]), case)), flush=True)
