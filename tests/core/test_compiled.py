"""torch.compile, torch.export and counters keep the CPU's kernels, as operations whose contracts PyTorch checks."""

import pytest
import torch
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from evolving_attention import EvolvingAttention, Geometry
from evolving_attention.kernels.cpu import dropout

FORWARD, BACKWARD, DROPOUT = (
    getattr(torch.ops.evolving_attention, name).default for name in ("cpu", "cpu_backward", "cpu_dropout")
)
SHAPES = {
    "evolving": {"alpha": 0.4, "beta": 0.3},
    "learnt shares": {"alpha": 0.4, "beta": 0.3, "learn_mix": True},
    "several convolutions": {"alpha": 0.4, "rule": "predictive", "conv_layers": 2},
    "no convolution": {"alpha": 0.4, "rule": "residual"},
    "given logits": {"alpha": 0.4, "beta": 0.3, "score": "multiplicative"},
}


class TwoLayers(torch.nn.Module):
    """Encoder self-attention whose second layer reads the map of the first."""

    def __init__(self, **options):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            EvolvingAttention(Geometry.ENCODER_SELF, 8, 2, first=first, **options) for first in (True, False)
        )

    def forward(self, x, padding=None):
        x, a_logit, *_ = self.layers[0](x, padding=padding)
        return self.layers[1](x, padding=padding, previous=a_logit, keep_map=False).output


class Decoder(torch.nn.Module):
    """Decoder self-attention, then encoder-decoder attention."""

    def __init__(self, **options):
        super().__init__()
        self.own = EvolvingAttention(Geometry.DECODER_SELF, 8, 2, **options)
        self.cross = EvolvingAttention(Geometry.ENCODER_DECODER, 8, 2, **options)

    def forward(self, x, padding=None):
        x = self.own(x, keep_map=False).output
        return self.cross(x, source=x.flip(1), padding=padding, need_weights=True, keep_map=False).output


MODELS = {name: (TwoLayers, options) for name, options in SHAPES.items()}
MODELS["decoder"] = Decoder, {"beta": 0.3}


def padded():
    x, padding = torch.randn(2, 5, 8), torch.zeros(2, 5, dtype=torch.bool)
    padding[1, -2:] = True
    return x, padding


class Seen:
    """A backend of torch.compile that runs AOTAutograd's graphs as they are, and notes which kernels are in them."""

    def __init__(self):
        from torch._dynamo.backends.common import aot_autograd

        self.operations = []
        self.backend = aot_autograd(fw_compiler=self._note)

    def _note(self, graph, inputs):
        self.operations += [node.target for node in graph.graph.nodes]
        return graph.forward


@pytest.mark.parametrize("name", MODELS)
def test_a_compiled_training_step_is_the_eager_one(name):
    model_class, options = MODELS[name]
    model, (x, padding) = model_class(**options), padded()

    def step(x, padding):
        return model(x, padding).square().sum()

    seen = Seen()
    compiled = torch.compile(step, fullgraph=True, backend=seen.backend)
    results = []
    for way in (step, compiled):
        loss = way(x, padding)
        results.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    assert FORWARD in seen.operations and BACKWARD in seen.operations
    for ours, expected in zip(*reversed(results), strict=True):
        assert_close(ours, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_inductor_compiles_stacked_convolutions_for_changing_lengths():
    model, (x, padding) = TwoLayers(**SHAPES["several convolutions"]), padded()
    assert_close(torch.compile(model, dynamic=True)(x, padding), model(x, padding), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_an_exported_model_keeps_the_kernel(name):
    model_class, options = MODELS[name]
    model, (x, padding) = model_class(**options).eval(), padded()
    batch, length = torch.export.Dim("batch", min=2), torch.export.Dim("length", min=2)
    shapes = {"x": {0: batch, 1: length}, "padding": {0: batch, 1: length}}
    program = torch.export.export(model, (x, padding), dynamic_shapes=shapes)
    assert FORWARD in [node.target for node in program.graph.nodes]
    assert_close(program.module()(x, padding), model(x, padding), rtol=1e-6, atol=1e-6)
    x, padding = torch.randn(3, 7, 8), torch.zeros(3, 7, dtype=torch.bool)
    assert_close(program.module()(x, padding), model(x, padding), rtol=1e-6, atol=1e-6)


@torch.no_grad()
def test_an_onnx_graph_has_operations_that_onnx_knows():
    runtime, (x, padding) = pytest.importorskip("onnxruntime"), padded()
    model, dynamic = TwoLayers(**SHAPES["evolving"]).eval(), dict.fromkeys((0, 1), torch.export.Dim.DYNAMIC)
    graph = torch.onnx.export(model, (x, padding), dynamo=True, dynamic_shapes=(dynamic, dynamic), verbose=False)
    session = runtime.InferenceSession(graph.model_proto.SerializeToString())
    x, padding = torch.randn(3, 7, 8), torch.zeros(3, 7, dtype=torch.bool)
    (output,) = session.run(None, {"x": x.numpy(), "padding": padding.numpy()})
    assert_close(torch.from_numpy(output), model(x, padding), rtol=1e-5, atol=1e-5)


class Calls(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the calls of our operations."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "evolving_attention":
            self.calls.append((function, torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, args)))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", MODELS)
def test_pytorch_accepts_the_operations(name):
    """Schemas, autograd and the shapes and strides that compilation foresees."""
    model_class, options = MODELS[name]
    model, (x, padding) = model_class(dropout=0.2, **options), padded()
    with Calls() as seen:
        model(x, padding).square().sum().backward()
    for operation, arguments in seen.calls:
        if operation is FORWARD:  # the way back has no derivatives
            floats = [isinstance(x, torch.Tensor) and x.is_floating_point() for x in arguments]
            arguments = [x.requires_grad_() if floating else x for x, floating in zip(arguments, floats, strict=True)]
        torch.library.opcheck(operation, tuple(arguments))
    assert {operation for operation, _ in seen.calls} == {FORWARD, BACKWARD}


def test_pytorch_accepts_dropout():
    x = torch.randn(4, 6).t().requires_grad_()
    torch.library.opcheck(DROPOUT, (x, 30_000, torch.tensor(5)))
    compiled = torch.compile(lambda x: dropout.drop(x, 0.5), fullgraph=True, backend=Seen().backend)
    torch.manual_seed(1)
    expected = dropout.drop(x, 0.5)
    torch.manual_seed(1)
    assert torch.equal(compiled(x), expected)


@pytest.mark.parametrize("name", MODELS)
def test_the_kernel_gives_the_numbers_of_the_plain_composition_and_counts_its_operations(name):
    model_class, options = MODELS[name]
    counts, outputs = [], []
    for plain in (False, True):
        torch.manual_seed(1)
        model, (x, padding) = model_class(plain=plain, **options), padded()
        with FlopCounterMode(display=False) as counter:
            outputs.append(model(x, padding))
            forward = counter.get_total_flops()
            outputs[-1].sum().backward()
        counts.append((forward, counter.get_total_flops()))
    assert counts[0] == counts[1]
    assert_close(*outputs, rtol=1e-5, atol=1e-5)
