"""Evolving attention in models of Hugging Face's ``transformers``: BERT, RoBERTa, T5, ViT, GPT-2 and their like.

    model = evolve(BertModel.from_pretrained("bert-base-uncased"), alpha=0.1, beta=0.1)
    model.save_pretrained("evolved")
    model = from_pretrained(BertModel, "evolved")

Each attention layer gets an ``Evolution``, named ``evolution``. The maps of a call travel with the call, in a keyword
argument that ``transformers`` hands down to its attention function. Encoders hand maps from layer to layer. Decoders
keep the last rows of their maps in the cache, beside keys and values.

Axes: B batch, K heads, T target (query) length, S source (key) length, D head size. Masks: True = masked.
"""

import copy
import sys
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer, EncoderDecoderCache
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from .evolution import Evolution, Geometry, check
from .functional import attend
from .kernels import Call, sees
from .masks import MASKED_FROM, hide_rows

#: the name of the attention implementation
NAME = "evolving"
#: the entry of config.json with the arguments of ``evolve``
SETTINGS = "evolving_attention"
#: model types whose kinds of attention are known; others may share layers, cut maps into windows, or cap logits
MODEL_TYPES = (
    *("bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert", "vit", "deit", "dinov2", "gpt2", "opt"),
    *("t5", "mt5", "bart", "mbart", "marian", "pegasus", "m2m_100"),
)

Model = TypeVar("Model", bound=PreTrainedModel)


def evolve(
    model: Model,
    alpha: float = 0.1,
    beta: float = 0.1,
    rule: str = "evolving",
    kernel_size: int = 3,
    learn_mix: bool = False,
) -> Model:
    """Put an ``Evolution`` into every attention layer of a model, in place.

    New parameters are fresh; all others stay. With ``learn_mix`` and alpha = beta = 0 the model's function stays too.

    Args:
        model: one of ``MODEL_TYPES``, or made of such models.
        alpha, beta, rule, kernel_size, learn_mix: see ``Evolution``.

    Returns:
        The same model.

    Raises:
        ValueError: an unknown setting, or a model of another type, that evolves or was saved evolving, or whose
            configuration asks for attention maps.
    """
    settings = {"alpha": alpha, "beta": beta, "rule": rule, "kernel_size": kernel_size, "learn_mix": learn_mix}
    _check(model, settings)
    copied: dict[int, Any] = {}  # other models may share the configuration
    for module in model.modules():
        if isinstance(getattr(module, "config", None), PreTrainedConfig):
            module.config = copy.deepcopy(module.config, copied)
    before: dict[str, nn.Module] = {}  # prefix of a stack -> its last encoder layer so far
    for name, module in model.named_modules():
        if not _is_attention(module):
            continue
        geometry, stack = _geometry(name, module), _stack(model, name)
        previous = before.get(stack) if geometry == Geometry.ENCODER_SELF else None
        options = {"rule": rule, "first": previous is None, "learn_mix": learn_mix}
        evolution = Evolution(geometry, _heads(module), kernel_size, alpha, beta, **options)
        module.evolution = evolution.to(next(module.parameters()))
        module.hands_on_map = False
        # Names, since DataParallel's copies of a layer share them, but are other modules.
        module.map_name = name
        module.map_before = previous.map_name if evolution.uses_previous else None
        if evolution.uses_previous:
            previous.hands_on_map = True
        if geometry == Geometry.ENCODER_SELF:
            before[stack] = module
        module.register_forward_pre_hook(_hand_down_cache, with_kwargs=True)
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.register_forward_pre_hook(_begin_call, with_kwargs=True)
    model.set_attn_implementation(NAME)
    setattr(model.config, SETTINGS, settings)
    return model


def from_pretrained(model_class: type[Model], folder: str, **options: Any) -> Model:
    """Load what ``save_pretrained`` of an evolved model wrote: settings and weights.

    Args:
        model_class: the model's class, for example ``BertModel``.
        folder: the folder, or a name on the hub.
        options: of ``model_class.from_pretrained``, but ``output_loading_info``.

    Raises:
        ValueError: a class that only chooses one, such as ``AutoModel``, or a checkpoint without evolving attention.
    """
    if not issubclass(model_class, PreTrainedModel):
        raise ValueError(f"{model_class.__name__}: must be a model's own class, such as BertModel")

    def build(self: Model, config: Any, *arguments: Any, **keywords: Any) -> None:
        model_class.__init__(self, config, *arguments, **keywords)
        settings = vars(self.config).pop(SETTINGS, None)
        if not settings:
            raise ValueError(
                f"{folder}: its configuration has no {SETTINGS!r}; load it with {model_class.__name__}.from_pretrained "
                "and pass it to evolve"
            )
        evolve(self, **settings)

    evolved = type(model_class.__name__, (model_class,), {"__init__": build, "__module__": model_class.__module__})
    model, info = evolved.from_pretrained(folder, output_loading_info=True, **options)
    if missing := sorted(key for key in info["missing_keys"] if ".evolution." in key):
        raise ValueError(f"{folder}: has no {missing[0]}; was it saved by a model that did not evolve?")
    model.__class__ = model_class
    return model


class EvolvingLayer(DynamicLayer):
    """The cache of one layer: keys, values, and the last rows that the convolution read, B x K x (k - 1) x S."""

    is_croppable = False

    def __init__(self, keys_and_values: DynamicLayer) -> None:
        self.__dict__.update(keys_and_values.__dict__)
        self.above: Tensor | None = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        self.above = self.above.index_select(0, beam_idx.to(self.above.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self.above = self.above.repeat_interleave(repeats, dim=0)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self.above = self.above[indices]

    def reset(self) -> None:
        super().reset()
        self.above = None

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse assisted decoding, which takes back tokens.

        Raises:
            NotImplementedError: always; the rows before the last ones are not kept.
        """
        raise NotImplementedError("an evolving model keeps the last rows of its maps only: assisted decoding, which "
                                  "takes back tokens, does not work")  # fmt: skip


class _Maps:
    """The maps of one call: A_logit of each encoder layer so far, and whether gradients were recorded then.

    Args:
        need_weights: whether the call returns the maps.
        mask: of the model's inputs, B x (at least T), 0 where they are padded.
    """

    def __init__(self, need_weights: bool, mask: Tensor | None = None) -> None:
        self.need_weights = need_weights
        self._mask = mask
        self.of: dict[str, tuple[Tensor, bool]] = {}
        self._masks: list[tuple[Tensor, tuple[Tensor, Tensor | None]]] = []  # each mask of this call, and its parts

    def read(self, mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """``_read_mask``, once for the layers that share a mask: on a GPU it waits."""
        if mask is None:
            return None, None
        for other, found in self._masks:
            if other is mask:
                return found
        self._masks.append((mask, _read_mask(mask)))
        return self._masks[-1][1]

    def padding(self, length: int) -> Tensor | None:
        """The padding of the last inputs, B x length; None where the mask is none of padding alone."""
        return self._mask[:, -length:].eq(0) if self._mask is not None and self._mask.dim() == 2 else None

    def before(self, module: nn.Module) -> Tensor | None:
        """A_logit of the layer before, B x K x T x S; None in the first layer, after a dropped one, and in decoders."""
        if module.map_before not in self.of:
            return None
        a_logit, recorded = self.of[module.map_before]
        if torch.is_grad_enabled() and not recorded:
            raise RuntimeError(
                "gradient checkpointing with use_reentrant=True cuts the gradients of attention maps: call "
                'gradient_checkpointing_enable({"use_reentrant": False})'
            )
        return a_logit


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    position_bias: Tensor | None = None,
    *,
    evolving_maps: _Maps | None = None,
    evolving_cache: Cache | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention function: the context, B x T x K x D, and the weights where they are asked for.

    query is B x K x T x D; key and value are B x K x S x D. The mask broadcasts to B x K x T x S. Its numbers up to
    ``MASKED_FROM`` mask. Others are added to the logits.
    """
    evolution = module.evolution
    if evolving_maps is None and evolution.geometry == Geometry.ENCODER_DECODER:  # GPT-2 hands nothing down to these
        evolving_maps = _Maps(need_weights=True)
    scaling = query.size(-1) ** -0.5 if scaling is None else scaling
    if evolution.conv is None and not evolution.uses_previous and not module.hands_on_map:
        # Nothing evolves: the model's own eager attention, to the last bit.
        bias = {} if position_bias is None else {"position_bias": position_bias}
        eager = vars(sys.modules[type(module).__module__])["eager_attention_forward"]
        return eager(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **bias)
    masked, summand = evolving_maps.read(attention_mask)
    given = None
    if position_bias is not None or summand is not None:
        given = torch.matmul(query, key.transpose(2, 3)) * scaling
        given = sum((more for more in (position_bias, summand) if more is not None), start=given).type_as(query)
    hidden = masked
    if masked is not None and evolution.geometry == Geometry.ENCODER_SELF and query.size(2) == key.size(2):
        hidden = hide_rows(masked, masked.all(dim=2).any(dim=1))
    elif evolution.geometry == Geometry.ENCODER_DECODER:
        hidden = hide_rows(masked, evolving_maps.padding(query.size(2)))
    previous = evolving_maps.before(module)
    layer, above = _cached_layer(evolving_cache, module), None
    if layer is not None and layer.above is None:
        if evolving_cache.get_seq_length(module.layer_idx) > query.size(2):
            raise ValueError("past_key_values: holds keys and values without the rows of maps that the convolution "
                             "reads; let the evolving model fill it from the start")  # fmt: skip
        if module.training and torch.is_grad_enabled():
            layer = None  # nothing goes on from a training step's cache, and no kernel has a backward pass with rows
    if layer is not None:
        first = query.new_zeros(*query.shape[:2], evolution.rows_above, 0)
        above = first if layer.above is None else layer.above
    call = Call(
        *(query, key, value, scaling, evolution.geometry, evolution.coefficients(previous is not None)),
        *(None, None) if evolution.conv is None else (evolution.conv.weight, evolution.conv.bias),
        given,
        hidden=hidden,
        masked=masked,
        previous=previous,
        above=above,
        dropout=dropout,
        keep_map=module.hands_on_map,
        need_weights=evolving_maps.need_weights,
    )
    result = attend(call, evolution)
    if result.a_logit is not None:
        evolving_maps.of[module.map_name] = result.a_logit, torch.is_grad_enabled()
    if layer is not None:
        layer.above = result.kept
    weights = None if result.weights is None else result.weights.type_as(value)
    return result.context.transpose(1, 2).contiguous(), weights


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, eager_mask)


def _read_mask(mask: Tensor) -> tuple[Tensor, Tensor | None]:
    """The hidden places of a mask, bool, and its summand of the logits; both broadcast to B x K x T x S."""
    if mask.dtype == torch.bool:
        return ~mask, None
    masked = mask <= MASKED_FROM
    rest = mask.masked_fill(masked, 0)
    unread = torch.compiler.is_compiling() or not sees(rest)
    return masked, rest if unread or bool(rest.any()) else None


def _cached_layer(cache: Cache | None, module: nn.Module) -> EvolvingLayer | None:
    """The cache of this layer, which gets a place for rows of maps; None without a cache, or without a convolution."""
    geometry = module.evolution.geometry
    if cache is None or geometry == Geometry.ENCODER_SELF or module.evolution.rows_above == 0:
        return None
    if isinstance(cache, EncoderDecoderCache):
        cross = geometry == Geometry.ENCODER_DECODER
        cache = cache.cross_attention_cache if cross else cache.self_attention_cache
    layer = cache.layers[module.layer_idx]
    if type(layer) is DynamicLayer:
        layer = cache.layers[module.layer_idx] = EvolvingLayer(layer)
    if not isinstance(layer, EvolvingLayer):
        raise NotImplementedError(f"{type(layer).__name__}: an evolving model needs a DynamicCache; leave out "
                                  "cache_implementation")  # fmt: skip
    return layer


def _begin_call(model: PreTrainedModel, arguments: tuple, keywords: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Before a model's forward: new maps."""
    need_weights = bool(keywords.get("output_attentions", model.config.output_attentions))
    return arguments, {**keywords, "evolving_maps": _Maps(need_weights, keywords.get("attention_mask"))}


def _hand_down_cache(module: nn.Module, arguments: tuple, keywords: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Before an attention layer's forward: the cache reaches the attention function too."""
    if module.config._attn_implementation != NAME:
        raise ValueError(
            f"attention implementation {module.config._attn_implementation!r} hides the attention map; expected "
            f"{NAME!r}: call model.set_attn_implementation({NAME!r})"
        )
    return arguments, {**keywords, "evolving_cache": keywords.get("past_key_values")}


def _check(model: PreTrainedModel, settings: dict[str, Any]) -> None:
    """Refuse what ``evolve`` cannot do, before anything changes."""
    check(*(settings[name] for name in ("rule", "kernel_size", "alpha", "beta")))
    if any(isinstance(module, Evolution) for module in model.modules()):
        raise ValueError(f"{type(model).__name__}: it evolves already")
    if getattr(model.config, SETTINGS, None):
        raise ValueError(
            f"{type(model).__name__}: it was saved evolving, and loaded without its convolutions; load it with "
            "evolving_attention.huggingface.from_pretrained"
        )
    if model.config.output_attentions:  # transformers could not save it
        raise ValueError("output_attentions: must be False in the configuration; give it to the model's calls instead")
    types = {module.config.model_type for module in model.modules() if _is_attention(module) or _is_innermost(module)}
    unknown = types.difference(MODEL_TYPES)
    if unknown:
        raise ValueError(f"model type {', '.join(sorted(unknown))}: must be one of {', '.join(MODEL_TYPES)}")


def _is_attention(module: nn.Module) -> bool:
    """Whether a module calls the attention function: such modules have a factor ``scaling`` of their own."""
    return hasattr(module, "scaling") and hasattr(module, "config") and "Attention" in type(module).__name__


def _is_innermost(module: nn.Module) -> bool:
    """Whether a module is a part of a model, as an encoder is: an unknown one may have attention of another kind."""
    parts = (part for part in module.modules() if isinstance(part, PreTrainedModel))
    return isinstance(module, PreTrainedModel) and list(parts) == [module]


def _geometry(name: str, module: nn.Module) -> Geometry:
    """The kind of attention of a module of this name."""
    if "CrossAttention" in type(module).__name__ or getattr(module, "is_cross_attention", False):
        return Geometry.ENCODER_DECODER
    # Names in T5 and in BART.
    if name.endswith(("EncDecAttention", "encoder_attn")):
        return Geometry.ENCODER_DECODER
    causal = getattr(module, "is_causal", False) or getattr(module, "is_decoder", False)
    return Geometry.DECODER_SELF if causal else Geometry.ENCODER_SELF


def _stack(model: PreTrainedModel, name: str) -> str:
    """The name of the innermost model around a layer: T5 has one for its encoder and one for its decoder."""
    prefixes = [prefix for prefix, module in model.named_modules() if isinstance(module, PreTrainedModel)]
    return max((prefix for prefix in prefixes if not prefix or name.startswith(f"{prefix}.")), key=len)


def _heads(module: nn.Module) -> int:
    """K of an attention layer."""
    return next(
        getattr(module, name) for name in ("num_attention_heads", "num_heads", "n_heads") if hasattr(module, name)
    )
