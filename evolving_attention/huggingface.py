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
import functools
import inspect
import sys
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer, EncoderDecoderCache
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from . import __version__
from .call import PLAIN, Call
from .evolution import Evolution, Geometry, check
from .functional import attend
from .kernels import sees
from .masks import MASKED_FROM, hide_rows

#: the name of the attention implementation
NAME = "evolving"
#: the entry of config.json with the arguments of ``evolve``, and the version
SETTINGS = "evolving_attention"
#: model types whose kinds of attention are known; others may share layers, cut maps into windows, or cap logits
MODEL_TYPES = (
    *("bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert", "vit", "deit", "dinov2", "gpt2", "opt"),
    *("t5", "mt5", "bart", "mbart", "marian", "pegasus", "m2m_100"),
)

Model = TypeVar("Model", bound=PreTrainedModel)
#: an attention layer of ``transformers``, whose parts have other names in each model
Layer = Any


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
        ValueError: an unknown setting, or a model of another type, that is wrapped, evolves or was saved evolving, or
            whose configuration asks for attention maps.
    """
    settings = {"alpha": alpha, "beta": beta, "rule": rule, "kernel_size": kernel_size, "learn_mix": learn_mix}
    _check(model, settings)
    copied: dict[int, Any] = {}  # other models may share the configuration
    for module in model.modules():
        if isinstance(getattr(module, "config", None), PreTrainedConfig):
            module.config = copy.deepcopy(module.config, copied)
    before: dict[str, Layer] = {}  # prefix of a stack -> its last encoder layer so far
    for name, module in model.named_modules():
        if not _is_attention(module):
            continue
        geometry, stack = _geometry(name, module), _stack(model, name)
        # Its own one would be another, if the model was made of models that were there before.
        module.config = model.get_submodule(stack).config
        previous = before.get(stack) if geometry == Geometry.ENCODER_SELF else None
        first, heads = previous is None, _heads(module)
        evolution = Evolution(geometry, heads, kernel_size, alpha, beta, rule=rule, first=first, learn_mix=learn_mix)
        numbers = (*module.parameters(), *model.parameters())  # of a quantised layer, not all are floating
        module.evolution = evolution.to(next(x for x in numbers if x.is_floating_point()))
        module.hands_on_map = False
        # Names: copies of a layer, as DataParallel's, share them, but are other modules.
        module.map_name = name
        module.map_before = None
        if evolution.uses_previous and previous is not None:
            module.map_before, previous.hands_on_map = previous.map_name, True
        if geometry == Geometry.ENCODER_SELF:
            before[stack] = module
        module.register_forward_pre_hook(_hand_down_cache, with_kwargs=True)
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.register_forward_pre_hook(functools.partial(_begin_call, _names(module)), with_kwargs=True)
            module.config._attn_implementation = NAME
            # for config.json, so that no plain class takes the folder for a plain model's
            module.config.attn_implementation = NAME
    setattr(model.config, SETTINGS, {**settings, "version": __version__})
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
        has_axes = settings.pop("version", None) is not None
        evolve(self, **settings)
        if not has_axes:
            _shape_shares(self, ())

    evolved: Any = type(model_class.__name__, (model_class,), {"__init__": build, "__module__": model_class.__module__})
    model, info = evolved.from_pretrained(folder, output_loading_info=True, **options)
    if missing := sorted(key for key in info["missing_keys"] if ".evolution." in key):
        raise ValueError(f"{folder}: has no {missing[0]}; was it saved by a model that did not evolve?")
    model.__class__ = model_class
    _shape_shares(model, (1,))
    return model


def _shape_shares(model: nn.Module, shape: tuple[int, ...]) -> None:
    """Give learnt shares a shape: (1,), or () as in folders without a version."""
    for module in model.modules():
        if isinstance(module, Evolution):
            for name, share in module.named_parameters(recurse=False):
                setattr(module, name, nn.Parameter(share.detach().view(shape)))


class EvolvingLayer(DynamicLayer):
    """The cache of one layer: keys, values, and the last rows that the convolution read, B x K x (k - 1) x S."""

    is_croppable = False

    def __init__(self, keys_and_values: DynamicLayer) -> None:
        self.__dict__.update(keys_and_values.__dict__)
        self.above: Tensor | None = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        if self.above is not None:
            self.above = self.above.index_select(0, beam_idx.to(self.above.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        if self.above is not None:
            self.above = self.above.repeat_interleave(repeats, dim=0)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        if self.above is not None:
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
    """The maps of one call: A_logit of each encoder layer so far.

    Args:
        need_weights: whether the call returns the maps.
        mask: of the model's inputs; where it is B x (at least T), it is 0 where they are padded.
        config: the model's configuration.
    """

    def __init__(self, need_weights: bool, mask: Tensor | None = None, config: PreTrainedConfig | None = None) -> None:
        self.need_weights = need_weights
        self.mask = mask if isinstance(mask, Tensor) and mask.dim() == 2 else None
        self.config = config
        self._of: dict[str, Tensor | None] = {}
        self._parts: list[tuple[Tensor | None, bool, tuple[Tensor | None, ...]]] = []  # of each mask of this call

    def read(self, mask: Tensor | None, is_causal: bool, query: Tensor) -> list[Tensor | None]:
        """The masked places, the hidden ones, and the summand of the logits; all broadcast to B x K x T x S.

        Once for the layers that share a mask: reading waits for a GPU, and hiding rows makes a new mask. Where the mask
        is causal, it already hides the rows of padding on the left, and no row reads padding on the right.
        """
        found = next((parts for other, causal, parts in self._parts if other is mask and causal == is_causal), None)
        if found is None:
            masked, summand = (None, None) if mask is None else _read_mask(mask)
            padding = None
            if self.mask is not None and not is_causal:
                padding = self.mask[:, -query.size(2) :].eq(0).to(query.device)
            found = masked, hide_rows(masked, padding), summand
            self._parts.append((mask, is_causal, found))
        return [x if x is None else x.to(query.device) for x in found]

    def keep(self, module: Layer, a_logit: Tensor) -> None:
        """A_logit of a layer, B x K x T x S, for the next one."""
        self._of[module.map_name] = a_logit

    def before(self, module: Layer, device: torch.device) -> Tensor | None:
        """A_logit of the layer before, B x K x T x S; None in the first layer, after a dropped one, and in decoders."""
        if module.map_before not in self._of:
            return None
        a_logit = self._of[module.map_before]
        if a_logit is None and torch.is_grad_enabled():
            raise RuntimeError(
                "gradient checkpointing with use_reentrant=True cuts the gradients of attention maps: call "
                'gradient_checkpointing_enable({"use_reentrant": False})'
            )
        if a_logit is None:
            raise RuntimeError(f"{module.map_name}: was called twice, and the map before it is kept for one call")
        if not torch.is_grad_enabled():
            self._of[module.map_before] = None  # else the maps of all layers would stay in memory
        return a_logit.to(device)


def _attention(
    module: Layer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    position_bias: Tensor | None = None,
    *,
    is_causal: bool | None = None,
    evolving_maps: _Maps | None = None,
    evolving_cache: Cache | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention function: the context, B x T x K x D, and the weights where they are asked for.

    query is B x K x T x D; key and value are B x K x S x D. The mask broadcasts to B x K x T x S. Its numbers up to
    ``MASKED_FROM`` mask. Others are added to the logits.

    Raises:
        ValueError: a model that does not evolve, a part of a model called alone, or a cache of a plain model.
    """
    evolution = getattr(module, "evolution", None)
    if evolution is None:
        raise ValueError(
            f"{type(module).__name__}: its configuration is an evolving model's, but it has no convolutions; load it "
            'with evolving_attention.huggingface.from_pretrained, or as a plain model with attn_implementation="eager"'
        )
    scaling = query.size(-1) ** -0.5 if scaling is None else scaling
    if evolution.conv is None and not evolution.uses_previous and not module.hands_on_map:
        # Nothing evolves: the model's own eager attention, to the last bit.
        bias = {} if position_bias is None else {"position_bias": position_bias}
        return _eager(module)(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **bias)
    if evolving_maps is None:
        if evolution.geometry != Geometry.ENCODER_DECODER:  # GPT-2 hands nothing down to these
            raise ValueError(f"{module.map_name}: maps belong to a call of a whole model; call that, not a part of it")
        evolving_maps = _Maps(need_weights=True)
    # With False, transformers masks padding alone.
    causal = evolution.geometry == Geometry.DECODER_SELF and is_causal is not False
    masked, hidden, summand = evolving_maps.read(attention_mask, causal, query)
    if evolution.geometry == Geometry.ENCODER_DECODER and not getattr(module, "has_relative_attention_bias", True):
        position_bias = None  # T5 gives zeros, and a kernel is faster without them
    given = None
    if position_bias is not None or summand is not None:
        given = torch.matmul(query, key.transpose(2, 3)) * scaling
        given = sum((more for more in (position_bias, summand) if more is not None), start=given).type_as(query)
    previous = evolving_maps.before(module, query.device)
    layer, above = _cached_layer(evolving_cache, module), None
    known = 0 if layer is None or layer.above is None else layer.above.size(3)
    reads_above = evolution.geometry == Geometry.DECODER_SELF and evolution.rows_above > 0
    if reads_above and known + query.size(2) != key.size(2):
        raise ValueError("cache: holds keys and values without the rows of maps that the convolution reads; let the "
                         "evolving model alone fill it, from the start")  # fmt: skip
    if layer is not None and layer.above is None and module.training and torch.is_grad_enabled():
        layer = None  # nothing goes on from a training step's cache, and no kernel has a backward pass with rows
    if layer is not None:
        first = query.new_zeros(*query.shape[:2], evolution.rows_above, 0)
        above = first if layer.above is None else layer.above
    call = Call(
        q=query,
        k=key,
        v=value,
        given=given,
        previous=previous,
        weight=None if evolution.conv is None else evolution.conv.weight,
        bias=None if evolution.conv is None else evolution.conv.bias,
        hidden=hidden,
        masked=masked,
        above=above,
        coefficients=evolution.coefficients(previous is not None),
        scale=scaling,
        geometry=evolution.geometry,
        dropout=dropout,
        keep_map=module.hands_on_map,
        need_weights=evolving_maps.need_weights,
    )
    result = attend(call, evolution)
    if result.a_logit is not None:
        evolving_maps.keep(module, result.a_logit)
    if layer is not None:
        layer.above = result.kept
    weights = None if result.weights is None else result.weights.type_as(value)
    return result.context.transpose(1, 2), weights


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, eager_mask)


def _read_mask(mask: Tensor) -> tuple[Tensor, Tensor | None]:
    """The hidden places of a mask, bool, and its summand of the logits; both broadcast to B x K x T x S."""
    if mask.dtype == torch.bool:
        return ~mask, None
    masked = mask <= MASKED_FROM
    rest = mask.masked_fill(masked, 0)
    unread = type(rest) not in PLAIN or rest.is_meta or torch.compiler.is_compiling() or not sees(rest)
    return masked, rest if unread or bool(rest.any()) else None


def _eager(module: Layer) -> Any:
    """The eager attention of the file of ``transformers`` that a layer's class comes from, or the class it extends."""
    files = (vars(sys.modules[kind.__module__]) for kind in type(module).__mro__)
    return next(file["eager_attention_forward"] for file in files if "eager_attention_forward" in file)


def _cached_layer(cache: Cache | None, module: Layer) -> EvolvingLayer | None:
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


def _names(module: nn.Module) -> tuple[str, ...]:
    """The names of what ``forward`` takes by position."""
    parameters = inspect.signature(module.forward).parameters.values()
    return tuple(x.name for x in parameters if x.kind == inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _bound(names: tuple[str, ...], module: nn.Module, arguments: tuple, keywords: dict[str, Any]) -> dict[str, Any]:
    """A call's arguments by name."""
    if len(arguments) > len(names):
        raise ValueError(f"{type(module).__name__}: takes arguments without a name; give them by keyword")
    return {**dict(zip(names, arguments, strict=False)), **keywords}


def _begin_call(
    names: tuple[str, ...], model: PreTrainedModel, arguments: tuple, keywords: dict[str, Any]
) -> tuple[tuple, dict[str, Any]]:
    """Before a model's forward: new maps."""
    bound = _bound(names, model, arguments, keywords)
    need_weights = bool(bound.get("output_attentions"))  # transformers lets no configuration ask for them
    mask, outer = bound.get("attention_mask"), keywords.get("evolving_maps")
    has_four_axes = isinstance(mask, Tensor) and mask.dim() == 4
    if outer and outer.config is model.config and has_four_axes and not model.config.is_encoder_decoder:
        mask = outer.mask  # DINOv2's encoder is a PreTrainedModel too; DINOv2 makes this mask for it from the user's
    return arguments, {**keywords, "evolving_maps": _Maps(need_weights, mask, model.config)}


def _hand_down_cache(module: Layer, arguments: tuple, keywords: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Before an attention layer's forward: the cache reaches the attention function too.

    Found by its type: its name was past_key_values before transformers 5.24, and is cache since.
    """
    if module.config._attn_implementation != NAME:
        raise ValueError(
            f"attention implementation {module.config._attn_implementation!r} hides the attention map; expected "
            f"{NAME!r}: call model.set_attn_implementation({NAME!r})"
        )
    cache = next((given for given in (*arguments, *keywords.values()) if isinstance(given, Cache)), None)
    return arguments, {**keywords, "evolving_cache": cache}


def _check(model: PreTrainedModel, settings: dict[str, Any]) -> None:
    """Refuse what ``evolve`` cannot do, before anything changes."""
    check(*(settings[name] for name in ("rule", "kernel_size", "alpha", "beta")))
    if not isinstance(model, PreTrainedModel):  # PEFT, which wraps one, saves only the parts that it knows
        raise ValueError(f"{type(model).__name__}: expected a model of transformers; evolve it before you wrap it")
    if any(isinstance(module, Evolution) for module in model.modules()):
        raise ValueError(f"{type(model).__name__}: it evolves already")
    if getattr(model.config, SETTINGS, None):
        raise ValueError(
            f"{type(model).__name__}: its configuration is an evolving model's, but it has no convolutions; load it "
            f"with evolving_attention.huggingface.from_pretrained, or del model.config.{SETTINGS} to begin anew"
        )
    if model.config.output_attentions:  # transformers could not save it
        raise ValueError("output_attentions: must be False in the configuration; give it to the model's calls instead")
    for name, module in model.named_modules():
        if getattr(module, "reorder_and_upcast_attn", False):
            raise ValueError("reorder_and_upcast_attn: not supported; set it to False in the configuration")
        if _is_attention(module):
            _geometry(name, module)
    types = {module.config.model_type for module in model.modules() if _is_attention(module) or _is_innermost(module)}
    unknown = types.difference(MODEL_TYPES)
    if unknown:
        raise ValueError(f"model type {', '.join(sorted(unknown))}: must be one of {', '.join(MODEL_TYPES)}")


def _is_attention(module: nn.Module) -> bool:
    """Whether a module calls the attention function: such modules have a factor ``scaling`` of their own."""
    return hasattr(module, "scaling") and hasattr(module, "config")


def _is_innermost(module: nn.Module) -> bool:
    """Whether a module is a part of a model, as an encoder is: an unknown one may have attention of another kind."""
    parts = (part for part in module.modules() if isinstance(part, PreTrainedModel))
    return isinstance(module, PreTrainedModel) and list(parts) == [module]


def _geometry(name: str, module: nn.Module) -> Geometry:
    """The kind of attention of a module of this name.

    Raises:
        ValueError: a module that does not say whether it sees the future.
    """
    # Names in T5 and in BART.
    crosses = name.endswith(("EncDecAttention", "encoder_attn")) or getattr(module, "is_cross_attention", False)
    if crosses or any("CrossAttention" in kind.__name__ for kind in type(module).__mro__):
        return Geometry.ENCODER_DECODER
    causal = [getattr(module, name) for name in ("is_causal", "is_decoder") if hasattr(module, name)]
    if not causal:
        raise ValueError(f"{name}: expected is_causal or is_decoder, which say whether it is a decoder's attention")
    return Geometry.DECODER_SELF if any(causal) else Geometry.ENCODER_SELF


def _stack(model: PreTrainedModel, name: str) -> str:
    """The name of the innermost model around a layer: T5 has one for its encoder and one for its decoder."""
    prefixes = [prefix for prefix, module in model.named_modules() if isinstance(module, PreTrainedModel)]
    return max((prefix for prefix in prefixes if not prefix or name.startswith(f"{prefix}.")), key=len)


def _heads(module: Layer) -> int:
    """K of an attention layer."""
    return next(
        getattr(module, name) for name in ("num_attention_heads", "num_heads", "n_heads") if hasattr(module, name)
    )
