"""A translation model as two ONNX graphs: the encoder, and one step of the decoder with its caches as flat tensors.

A language model is the second alone. Both are made of the model's own modules, so a change of the model is a change of
its export.

Caches are separate for each decoder layer: stacked ones would be split, stacked and copied in every step.

Axes: N sentences, R = N x beams hypotheses, S source length, t steps before this one, K heads, D head size,
r = kernel size - 1, V words.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from fairseq.models import BaseFairseqModel, FairseqDecoder, FairseqEncoder
from fairseq.models.transformer import TransformerModelBase
from fairseq.models.transformer_lm import TransformerLanguageModel
from fairseq.modules.quantization.scalar.utils import MAPPING
from onnxscript import opset20 as op
from torch import Tensor, nn

from evolving_attention.attention import EvolvingHeads
from evolving_attention.cache import Cache

from .attention import state_of
from .decoding import embed_step, features, position_table
from .private import check
from .transformer import EATransformerEncoder

#: the operator set of the graphs
OPSET = 20


class ExportedEncoder(nn.Module):
    """Source tokens to the keys and values that each decoder layer looks at."""

    if TYPE_CHECKING:  # as in attention.py
        encoder: FairseqEncoder

    def __init__(self, model: BaseFairseqModel):
        super().__init__()
        self.encoder = model.encoder
        self.attentions: Any = nn.ModuleList(layer.encoder_attn for layer in model.decoder.layers)

    def forward(self, tokens: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """tokens: N x S, padded on either side -> keys and values of each layer, N x K x S x D."""
        encoded = self.encoder(tokens)["encoder_out"][0]  # S x N x C
        keys = [_heads(attention.k_proj(encoded), attention) for attention in self.attentions]
        values = [_heads(attention.v_proj(encoded), attention) for attention in self.attentions]
        return keys, values


class ExportedStep(nn.Module):
    """One step of the decoder: the last tokens and the caches to the best next tokens and the next caches."""

    if TYPE_CHECKING:  # as in attention.py
        decoder: FairseqDecoder
        positions: Tensor | None

    def __init__(self, model: BaseFairseqModel):
        super().__init__()
        self.decoder = model.decoder
        self.register_buffer("positions", position_table(model.decoder))

    def forward(
        self,
        tokens: Tensor,
        step: Tensor,
        order: Tensor,
        bias: Tensor,
        top: Tensor,
        forced: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
        rows: list[Tensor] | None = None,
        padding: Tensor | None = None,
        source_keys: list[Tensor] | None = None,
        source_values: list[Tensor] | None = None,
        source_rows: list[Tensor] | None = None,
    ) -> tuple[Tensor | list[Tensor], ...]:
        """Take a step.

        Args:
            tokens: N x beams, the last token of each hypothesis, in the new order.
            step: of one number, t.
            order: R, the hypothesis of the step before that each continues.
            bias: V, added to the log-probabilities: minus infinity for words that must not come.
            top: of any numbers; its length is how many next tokens each hypothesis gets.
            forced: R, the token that must come next, as in a prefix; -1: any.
            keys, values: of each layer R x K x t x D.
            rows: of each layer R x K x r x t, the mixed rows above, of decoder self-attention; None where it does not
                evolve.
            padding: N x S, True = masked. A language model has neither padding nor source: all are None.
            source_keys, source_values: of each layer N x K x S x D, of the encoder.
            source_rows: of each layer R x K x r x S, of encoder-decoder attention; likewise.

        Returns:
            log-probabilities of the best next tokens and the tokens, R x top, best first; keys, values, rows and
            source_rows for the next step.
        """
        decoder, beams = self.decoder, tokens.size(1)
        x = embed_step(decoder, tokens.reshape(-1), self.positions, step)
        _same_sizes(
            tokens,
            order,
            padding,
            of_source=[*(source_keys or []), *(source_values or [])],
            of_steps=[*keys, *values],
            rows=rows or [],
            source_rows=source_rows or [],
        )
        caches = []
        for number, layer in enumerate(decoder.layers):
            state: dict[str, Any] = {}
            above = None if rows is None else rows[number].index_select(0, order)
            own = Cache(keys[number].index_select(0, order), values[number].index_select(0, order), None, above)
            layer.self_attn._set_input_buffer(state, state_of(own))
            if padding is None or source_keys is None or source_values is None:
                x, *_ = layer(x, incremental_state=state)
                source = {}
            else:
                above = None if source_rows is None else source_rows[number].index_select(0, order)
                # fairseq's own attention takes the padding of each sentence, ours that of each hypothesis
                evolves = isinstance(layer.encoder_attn, EvolvingHeads)
                hidden = padding[:, None, :].expand(-1, beams, -1).flatten(0, 1) if evolves else padding
                source = state_of(Cache(source_keys[number], source_values[number], hidden, above))
                layer.encoder_attn._set_input_buffer(state, {**source, "beams": beams})
                x, *_ = layer(x, x, hidden, state)
                source = layer.encoder_attn._get_input_buffer(state)
            own = layer.self_attn._get_input_buffer(state)
            caches.append((own["prev_key"], own["prev_value"], own.get("rows"), source.get("rows")))
        scores = F.log_softmax(decoder.output_layer(features(decoder, x)[:, 0]), dim=-1, dtype=torch.float32) + bias
        best, words = scores.topk(top.size(0), dim=-1)  # R x top
        is_forced, others = forced[:, None] >= 0, torch.full_like(best[:, 1:], -torch.inf)
        only = torch.cat([scores.gather(1, forced[:, None].clamp(min=0)), others], dim=1)
        best = torch.where(is_forced, only, best)
        words = torch.where(is_forced, forced[:, None], words)
        return best, words, *(list(cache) for cache in zip(*caches, strict=True) if cache[0] is not None)


def _same_sizes(
    tokens: Tensor,
    order: Tensor,
    padding: Tensor | None,
    of_source: list[Tensor],
    of_steps: list[Tensor],
    rows: list[Tensor],
    source_rows: list[Tensor],
) -> None:
    """Tell the tracer which sizes are equal, so that the graph computes none of them twice.

    The caches hold more hypotheses than `order` where sentences have left the batch.
    """
    (before, _, steps, _), sentences = of_steps[0].shape, tokens.size(0)
    length = 0 if padding is None else padding.size(1)
    if padding is not None:
        check(padding.size(0) == sentences)
    check(order.size(0) == sentences * tokens.size(1))
    for tensors, first, axis, size in (
        (of_source, sentences, 2, length),
        (rows, before, 3, steps),
        (source_rows, before, 3, length),
        (of_steps, before, 2, steps),
    ):
        for x in tensors:
            check(x.size(0) == first)
            check(x.size(axis) == size)


def _heads(x: Tensor, attention: nn.Module) -> Tensor:
    """S x N x C -> N x K x S x D"""
    return x.unflatten(2, (attention.num_heads, -1)).permute(1, 2, 0, 3)


def reason_against(model: BaseFairseqModel) -> str | None:
    """Why a model cannot be exported, or None."""
    if not isinstance(model, TransformerModelBase | TransformerLanguageModel):
        return f"{type(model).__name__} is neither a Transformer with encoder and decoder nor a language model"
    if model.decoder.adaptive_softmax is not None:
        return "it has an adaptive softmax"
    if any(isinstance(module, tuple(MAPPING.values())) for module in model.modules()):
        return "it rounds its numbers (--quant-noise-scalar)"
    if any(getattr(layer, "hands_on_maps", False) for layer in model.decoder.layers):
        return "its decoder's layers hand on maps (--ea-decoder-alpha, --ea-cross-alpha)"
    if not isinstance(model.decoder.embed_tokens, nn.Embedding):
        return f"its embedding is {type(model.decoder.embed_tokens).__name__}"
    if model.decoder.output_projection.weight.size(0) != model.decoder.embed_tokens.num_embeddings:
        return "it writes other words than it reads (--output-dictionary-size)"
    if isinstance(model, TransformerLanguageModel):
        return None
    if model.cfg.cross_self_attention or model.cfg.no_cross_attention:
        return "its decoder has no encoder-decoder attention of its own"
    return None


def plain_copy(model: BaseFairseqModel) -> BaseFairseqModel:
    """A copy of a model in evaluation for export: in float32, without kernels.

    fairseq's own encoder asks whether there is padding, which no graph can. Ours without evolution computes the same.
    """
    model = copy.deepcopy(model).float().cpu().requires_grad_(False)
    if isinstance(model, TransformerModelBase) and not isinstance(model.encoder, EATransformerEncoder):
        model.cfg.ea_alpha = model.cfg.ea_beta = 0.0
        encoder = EATransformerEncoder(model.cfg, model.encoder.dictionary, model.encoder.embed_tokens)
        encoder.load_state_dict(model.encoder.state_dict())
        model.encoder = encoder.eval()
    for module in model.modules():
        if isinstance(module, EvolvingHeads):
            module.plain = True
    return model


@torch.no_grad()
def export(model: BaseFairseqModel, folder: Path) -> None:
    """Write encoder.onnx and decoder.onnx of a translation model into a folder; of a language model the latter."""
    for name in ("onnx_ir", "onnxscript", "torch.onnx"):  # they tell each of their steps
        logging.getLogger(name).setLevel(logging.ERROR)
    model = plain_copy(model)
    layers = len(model.decoder.layers)
    source = None
    if isinstance(model, TransformerModelBase):
        encoder, tokens = ExportedEncoder(model).eval(), torch.full((2, 5), model.decoder.padding_idx + 3)
        dynamic = {"tokens": dict.fromkeys((0, 1), torch.export.Dim.DYNAMIC)}
        outputs = _of_layers(("source_keys", "source_values"), layers)
        _write(encoder, folder / "encoder.onnx", {"tokens": tokens}, dynamic, outputs)
        source = encoder(tokens)
    step = ExportedStep(model).eval()
    inputs, dynamic = example(model, source)
    caches = [name for name in ("keys", "values", "rows", "source_rows") if name in inputs]
    outputs = ["best", "words", *_of_layers([f"next_{name}" for name in caches], layers)]
    _write(step, folder / "decoder.onnx", inputs, dynamic, outputs)


def _of_layers(names: Iterable[str], layers: int) -> list[str]:
    return [f"{name}.{layer}" for name in names for layer in range(layers)]


def _write(
    module: nn.Module, path: Path, inputs: dict[str, Any], dynamic: dict[str, Any], outputs: Sequence[str]
) -> None:
    """A graph whose inputs are named as the arguments, those of layers with a number behind."""
    names = [_of_layers([name], len(x)) if isinstance(x, list) else [name] for name, x in inputs.items()]
    torch.onnx.export(
        module,
        (),
        path,
        kwargs=inputs,
        dynamo=True,
        opset_version=OPSET,
        dynamic_shapes=dynamic,
        input_names=[name for of in names for name in of],
        output_names=list(outputs),
        external_data=False,
        verbose=False,
        custom_translation_table={torch.ops.aten.lerp.Scalar: _lerp},
    )


def _lerp(start: Any, end: Any, weight: float) -> Any:
    """start + weight (end - start). By default the graph holds both of PyTorch's two formulas, and chooses."""
    return op.Add(start, op.Mul(op.Sub(end, start), op.Constant(value_float=weight)))


def example(
    model: BaseFairseqModel, source: tuple[list[Tensor], list[Tensor]] | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Inputs of a step after three others, and which of their axes are dynamic; source: keys and values."""
    layers = len(model.decoder.layers)
    sentences, beams, steps = 2, 3, 4
    hypotheses = sentences * beams
    attention = model.decoder.layers[0].self_attn
    inputs: dict[str, Any] = {
        "tokens": torch.full((sentences, beams), model.decoder.padding_idx + 3),
        "step": torch.tensor([steps]),
        "order": torch.arange(hypotheses),
        "bias": torch.zeros(model.decoder.output_projection.weight.size(0)),
        "top": torch.zeros(7),
        "forced": torch.full((hypotheses,), -1),
    }
    dynamic = {"tokens": (0, 1), "order": (0,), "top": (0,), "forced": (0,), "padding": (0, 1)}
    dynamic |= dict.fromkeys(("source_keys", "source_values"), (0, 2))
    for name in ("keys", "values"):
        shape = (hypotheses, attention.num_heads, steps, attention.head_dim)
        inputs[name], dynamic[name] = [torch.randn(shape) for _ in range(layers)], (0, 2)
    maps = [("rows", attention, steps)]
    if source is not None:
        inputs["source_keys"], inputs["source_values"] = source
        length = source[0][0].size(2)
        inputs["padding"] = torch.zeros(sentences, length, dtype=torch.bool)
        maps.append(("source_rows", model.decoder.layers[0].encoder_attn, length))
    for name, module, columns in maps:
        above = module.evolution.rows_above if isinstance(module, EvolvingHeads) else 0
        if above:
            inputs[name] = [torch.randn(hypotheses, module.num_heads, above, columns) for _ in range(layers)]
            dynamic[name] = (0, 3)
    axes = {name: dict.fromkeys(dynamic.get(name, ()), torch.export.Dim.DYNAMIC) for name in inputs}
    return inputs, {name: [axes[name]] * layers if isinstance(x, list) else axes[name] for name, x in inputs.items()}
