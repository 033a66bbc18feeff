"""The evolution of attention maps: equation 4, figure 3 of "Evolving Attention with Residual Convolutions" (ICML 2021).

The other rules of the papers are the same sum with other numbers in it.

    mixed   = a * previous + b * logits                  zero where hidden; the convolution's input
    carried = d * previous + e * logits
    A_logit = c * ReLU(Conv(mixed)) + (1 - c) * carried

``RULES`` has the values of a, b, c, d and e. Equation 4 has a = d = alpha, b = e = 1 - alpha, c = beta.

Maps in, maps out: nothing here knows of fairseq, of queries, or of the softmax that follows.

Axes: B batch, K heads, T target (query) length, S source (key) length; k kernel size, r = (k - 1) / 2. A map is a
tensor B x K x T x S, a picture with K channels, its rows the queries and its columns the keys. Masks: True = masked.
"""

import enum
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

#: A share of a map: a constant, or a parameter of one number where it is learnt.
Share = float | Tensor


class Geometry(enum.Enum):
    """The neighbours of pixel (i, j) that the convolution reads; outside of the map it reads zeros (figure 3)."""

    #: rows i-r..i+r, columns j-r..j+r: both directions are visible
    ENCODER_SELF = "encoder self-attention"
    #: rows i-k+1..i, columns j-k+1..j, without the kernel's strict upper triangle: what lies there is the future
    DECODER_SELF = "decoder self-attention"
    #: rows i-k+1..i, columns j-r..j+r: rows are target positions, so time runs down; every column is visible
    ENCODER_DECODER = "encoder-decoder attention"

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        """Geometry("encoder self-attention") is Geometry.ENCODER_SELF; of other values the error names the three."""
        raise ValueError(f"geometry {value!r}: must be one of {', '.join(map(str, cls))}")


@functools.cache
def reach(geometry: Geometry, kernel_size: int) -> tuple[int, int, bool]:
    """How far the convolution reaches to the left and up; whether it lacks its kernel's strict upper triangle."""
    centred, shifted = kernel_size // 2, kernel_size - 1
    left = shifted if geometry == Geometry.DECODER_SELF else centred
    top = centred if geometry == Geometry.ENCODER_SELF else shifted
    return left, top, geometry == Geometry.DECODER_SELF


class Coefficients(NamedTuple):
    """The five numbers of the sum above, of one layer."""

    a: Share  # of the previous map, in the convolution's input
    b: Share  # of the logits, in the convolution's input
    c: Share  # of the convolution, in the result
    d: Share  # of the previous map, in carried
    e: Share  # of the logits, in carried

    @property
    def carries_what_it_reads(self) -> bool:
        """Whether carried is always mixed itself, as in equation 4."""
        return _same(self.a, self.d) and _same(self.b, self.e)


#: For a layer without a previous map whose rule needs one: the logits stay as they are.
LOGITS_ONLY = Coefficients(0.0, 1.0, 0.0, 0.0, 1.0)


@dataclass(frozen=True)
class Rule:
    """One way for maps to evolve. To add a rule, add it to ``RULES``: see docs/model.md."""

    #: (alpha, beta) -> the coefficients in an encoder without a previous map, as in its first layer
    first: Callable[[Share, Share], Coefficients]
    #: (alpha, beta) -> the coefficients where there is one
    later: Callable[[Share, Share], Coefficients]
    #: (alpha, beta) -> those in a decoder without one; None: a decoder's attention is the plain Transformer's always
    decoder: Callable[[Share, Share], Coefficients] | None = None
    #: whether several convolutions may stand where an encoder has one: only where they read the previous map alone
    stackable: bool = False

    def coefficients(
        self, alpha: Share, beta: Share, has_previous: bool, geometry: Geometry = Geometry.ENCODER_SELF
    ) -> Coefficients:
        """The five numbers for an attention with or without a previous map."""
        without = self.first if geometry == Geometry.ENCODER_SELF else self.decoder
        if without is None:
            return LOGITS_ONLY
        return (self.later if has_previous else without)(alpha, beta)

    def evolves_in(self, geometry: Geometry) -> bool:
        """Whether the rule is for this kind of attention."""
        return geometry == Geometry.ENCODER_SELF or self.decoder is not None

    def uses_previous(self, alpha: float, beta: float, geometry: Geometry = Geometry.ENCODER_SELF) -> bool:
        """Whether a previous map, or that there is one, has any effect: else none need be handed on."""
        a, _, c, d, _ = self.coefficients(alpha, beta, True, geometry)
        return bool(d != 0 or (c != 0 and a != 0) or c != self.coefficients(alpha, beta, False, geometry).c)

    def depends_on(self, has_previous: bool, geometry: Geometry = Geometry.ENCODER_SELF) -> tuple[bool, bool]:
        """Whether an attention's coefficients change with alpha, and whether they change with beta."""
        low, high, middle, where = 0.25, 0.75, 0.5, (has_previous, geometry)
        return (
            self.coefficients(low, middle, *where) != self.coefficients(high, middle, *where),
            self.coefficients(middle, low, *where) != self.coefficients(middle, high, *where),
        )


def _logits_only(alpha: Share, beta: Share) -> Coefficients:
    return LOGITS_ONLY


def _without_previous(alpha: Share, beta: Share) -> Coefficients:
    return Coefficients(a=0.0, b=1.0, c=beta, d=0.0, e=1.0)


def _evolving(alpha: Share, beta: Share) -> Coefficients:
    rest = 1 - alpha
    return Coefficients(a=alpha, b=rest, c=beta, d=alpha, e=rest)


RULES = {
    # Evolving Attention with Residual Convolutions, ICML 2021, equation 4
    "evolving": Rule(first=_without_previous, later=_evolving, decoder=_without_previous),
    # the same without a convolution in the encoder's first layer: the draft, and the authors' code
    "evolving-from-second": Rule(first=_logits_only, later=_evolving, decoder=_without_previous),
    # Predictive Attention Transformer, equation 4
    "predictive": Rule(
        first=_logits_only,
        later=lambda alpha, beta: Coefficients(a=1.0, b=0.0, c=alpha, d=0.0, e=1.0),
        decoder=_logits_only,
        stackable=True,
    ),
    # Predictive Attention Transformer, table 5
    "residual": Rule(
        first=_logits_only,
        later=lambda alpha, beta: Coefficients(a=0.0, b=1.0, c=0.0, d=alpha, e=1 - alpha),
    ),
    # RealFormer, He et al. 2020
    "realformer": Rule(
        first=_logits_only,
        later=lambda alpha, beta: Coefficients(a=0.0, b=1.0, c=0.0, d=1.0, e=1.0),
    ),
}


#: kind of convolution -> its channels out and in, of K heads
CONVOLUTIONS: dict[str, Callable[[int], tuple[int, int]]] = {
    "dense": lambda heads: (heads, heads),  # the papers'
    "depthwise": lambda heads: (heads, 1),  # of each head's map alone
    "gated": lambda heads: (2 * heads, heads),  # Conv(x) * sigmoid(Gate(x)); the gate's channels are the second half
}


def check(rule: str, kernel_size: int, alpha: Share, beta: Share, conv_layers: int = 1, conv: str = "dense") -> None:
    """Refuse settings that no attention can have.

    Raises:
        ValueError: an unknown rule or kind of convolution, an even kernel, a share outside of [0, 1], or several
            convolutions where the rule has one.
    """
    for name, value, known in (("rule", rule, RULES), ("conv", conv, CONVOLUTIONS)):
        if value not in known:
            raise ValueError(f"{name} {value!r}: must be one of {', '.join(known)}")
    if kernel_size < 1 or kernel_size % 2 == 0:
        raise ValueError(f"kernel_size {kernel_size}: must be a positive odd number")
    for name, share in (("alpha", alpha), ("beta", beta)):
        if not isinstance(share, Tensor) and not 0 <= share <= 1:
            raise ValueError(f"{name} {share}: must be a number from 0 to 1")
    if conv_layers != 1 and not (conv_layers > 1 and RULES[rule].stackable):
        allowed = "1 or more" if RULES[rule].stackable else 1
        raise ValueError(f"conv_layers {conv_layers}: rule {rule!r} takes {allowed}")


class MapConvolution(nn.Conv2d):
    """PyTorch's convolution of K channels by a k x k kernel, which lies over a map as its geometry says.

    It is always called as a module, so that hooks, weight normalisation and pruning work.

    Args:
        geometry: the kind of attention.
        heads: K.
        kernel_size: k.
        kind: a name in ``CONVOLUTIONS``.
    """

    def __init__(self, geometry: Geometry, heads: int, kernel_size: int, kind: str = "dense"):
        outputs, inputs = CONVOLUTIONS[kind](heads)
        super().__init__(heads, outputs, kernel_size, groups=heads // inputs)
        self.geometry = geometry

    def forward(self, maps: Tensor, above: Tensor | None = None) -> Tensor:
        """B x K x T x S to the same. ``above``, B x K x (k - 1) x S, in decoders: the rows before these, else zeros."""
        return convolve(self.geometry, maps, above, self.weight, self.bias)


def convolve(geometry: Geometry, maps: Tensor, above: Tensor | None, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A MapConvolution with this weight and bias, whose channels say its kind; other arguments as its forward's.

    Raises:
        ValueError: no kind of convolution has such channels.
    """
    heads, channels = maps.size(1), (weight.size(0), weight.size(1))
    if all(channels != of(heads) for of in CONVOLUTIONS.values()):
        raise ValueError(f"weight: no convolution of {heads} heads has {channels[0]} x {channels[1]} channels")
    if not torch.compiler.is_compiling() and 0 in maps.shape:
        return maps  # conv2d refuses it
    convolved = _convolve(geometry, maps, above, weight, bias)
    return F.glu(convolved, dim=1) if channels[0] > heads else convolved


def _convolve(geometry: Geometry, maps: Tensor, above: Tensor | None, weight: Tensor, bias: Tensor | None) -> Tensor:
    """B x K x T x S -> B x channels x T x S"""
    size, groups = weight.size(-1), maps.size(1) // weight.size(1)
    if geometry == Geometry.ENCODER_SELF:
        return F.conv2d(maps, weight, bias, padding=size // 2, groups=groups)

    top = size - 1
    if above is not None:
        maps, top = torch.cat([above, maps], dim=2), 0
    if geometry == Geometry.DECODER_SELF:
        # tril, not a product with zeros: a removed tap has no effect whatever its weight holds
        return F.conv2d(F.pad(maps, (size - 1, 0, top, 0)), weight.tril(), bias, groups=groups)
    return F.conv2d(F.pad(maps, (0, 0, top, 0)), weight, bias, padding=(0, size // 2), groups=groups)


#: (mixed B x K x T x S, above or None, hidden or None) -> Conv(mixed), B x K x T x S
Convolve = Callable[[Tensor, Tensor | None, Tensor | None], Tensor]


def evolve(
    coefficients: Coefficients,
    logits: Tensor,
    hidden: Tensor | None,
    previous: Tensor | None,
    above: Tensor | None,
    convolve: Convolve | None,
) -> Tensor:
    """The sum at the head of this file: A_logit, B x K x T x S.

    Args:
        coefficients: the five numbers.
        logits, hidden, previous, above: see ``Evolution.forward``.
        convolve: None where there is no convolution.
    """
    _, _, c, d, e = coefficients
    if convolve is None or is_always(c, 0):
        return finite(_weighted(d, previous, e, logits))
    carried = _weighted(d, previous, e, logits)
    mixed = (
        _hide(carried, hidden) if coefficients.carries_what_it_reads else mix(coefficients, logits, hidden, previous)
    )
    convolved = finite(F.relu(convolve(mixed, above, hidden)))
    return finite(torch.lerp(carried, convolved, c))


def mix(coefficients: Coefficients, logits: Tensor, hidden: Tensor | None, previous: Tensor | None) -> Tensor:
    """The convolution's input, B x K x T x S, zero at hidden places. Arguments as ``evolve``'s."""
    return _hide(_weighted(coefficients.a, previous, coefficients.b, logits), hidden)


class Evolution(nn.Module):
    """Evolves the logits of one attention layer.

    Args:
        geometry: the kind of attention; its value does too, such as "encoder self-attention".
        heads: K, the convolutions' channels, in and out.
        kernel_size: k, odd.
        alpha: as the rule uses it; in equation 4 the previous map's share.
        beta: as the rule uses it; in equation 4 the convolution's share. Where the rule and these two leave the
            convolution no share there is no convolution, and no parameter.
        rule: a name in ``RULES``.
        first: whether this is the first layer, to which no layer hands a map. By default it is in decoders: the papers'
            hand on no maps.
        conv_layers: how many convolutions there are, one after the other, a ReLU after each; for ``predictive`` in
            encoders.
        conv: their kind, a name in ``CONVOLUTIONS``.
        learn_mix: whether alpha and beta are parameters of shape (1,), started at the values given, where the rule uses
            them.
    """

    def __init__(
        self,
        geometry: Geometry,
        heads: int,
        kernel_size: int = 3,
        alpha: float = 0.1,
        beta: float = 0.1,
        *,
        rule: str = "evolving",
        first: bool | None = None,
        conv_layers: int = 1,
        learn_mix: bool = False,
        conv: str = "dense",
    ):
        super().__init__()
        check(rule, kernel_size, alpha, beta, conv_layers, conv)
        self.geometry = geometry = Geometry(geometry)
        self.kernel_size = kernel_size
        self.rule = rule
        first = geometry != Geometry.ENCODER_SELF if first is None else first
        #: whether a layer before may hand it a map
        self.takes_map = takes_map = not first and RULES[rule].evolves_in(geometry)
        learns_alpha, learns_beta = RULES[rule].depends_on(takes_map, geometry) if learn_mix else (False, False)
        # With an axis, since FSDP shards no scalars.
        self.alpha = nn.Parameter(torch.tensor([float(alpha)])) if learns_alpha else alpha
        self.beta = nn.Parameter(torch.tensor([float(beta)])) if learns_beta else beta
        if learn_mix:
            alpha = beta = 1.0  # learnt shares may take any value
        #: whether a map of the layer before has any effect
        self.uses_previous = takes_map and RULES[rule].uses_previous(alpha, beta, geometry)
        convolves = RULES[rule].coefficients(alpha, beta, takes_map, geometry).c != 0
        if convolves and conv_layers > 1 and geometry != Geometry.ENCODER_SELF:
            raise ValueError(f"conv_layers {conv_layers}: {geometry.value} has one convolution at most")
        self.conv = MapConvolution(geometry, heads, kernel_size, conv) if convolves else None
        #: the convolutions that run before ``conv``, where there are several
        self.stacked = nn.ModuleList(
            MapConvolution(geometry, heads, kernel_size, conv) for _ in range(conv_layers - 1 if convolves else 0)
        )

    @property
    def rows_above(self) -> int:
        """Earlier rows that a row needs: what step-by-step decoding has to keep."""
        return self.kernel_size - 1 if self.conv is not None and self.geometry != Geometry.ENCODER_SELF else 0

    def coefficients(self, has_previous: bool) -> Coefficients:
        """The five numbers for a call with or without a previous map."""
        alpha, beta = (x.squeeze() if isinstance(x, Tensor) else x for x in (self.alpha, self.beta))
        return RULES[self.rule].coefficients(alpha, beta, has_previous, self.geometry)

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *others: Any) -> None:
        """Shares of checkpoints until version 0.2 have no axis."""
        for name in ("alpha", "beta"):
            if isinstance(share := state_dict.get(prefix + name), Tensor) and share.dim() == 0:
                state_dict[prefix + name] = share[None]
        super()._load_from_state_dict(state_dict, prefix, *others)

    def forward(
        self, logits: Tensor, hidden: Tensor | None = None, previous: Tensor | None = None, above: Tensor | None = None
    ) -> Tensor:
        """Evolve a map.

        Args:
            logits: B x K x T x S, scaled dot products, or other scores.
            hidden: broadcasts to B x K x T x S; True where the convolution must see zero, as it does outside the map
                (padded rows and columns, the future).
            previous: B x K x T x S, A_logit of the layer before; None in the first layer.
            above: B x K x rows_above x S, the mixed rows that come before these, in step-by-step decoding.

        Returns:
            A_logit, B x K x T x S, at hidden places too: only the convolution sees zeros there.
        """
        convolve = None if self.conv is None else self.convolve
        return evolve(self.coefficients(previous is not None), logits, hidden, previous, above, convolve)

    def convolve(self, mixed: Tensor, above: Tensor | None = None, hidden: Tensor | None = None) -> Tensor:
        """Conv(mixed), through all convolutions, before the last ReLU. Arguments and result as in ``forward``."""
        assert self.conv is not None, "this layer has no convolution"
        return self.conv(self.before_last(mixed, hidden), above)

    def before_last(self, mixed: Tensor, hidden: Tensor | None = None) -> Tensor:
        """The input of the last convolution: mixed, through the convolutions before it, zero at hidden places.

        Only encoders have several, so that there are no rows above.
        """
        for conv in self.stacked:
            mixed = _hide(finite(F.relu(conv(mixed))), hidden)
        return mixed

    def for_one_convolution(self, hidden: Tensor | None, previous: Tensor | None) -> Tensor | None:
        """The map that a kernel, which knows one convolution only, is given in the place of the previous one.

        It is ``previous``, B x K x T x S, zero at hidden places, through the convolutions before ``conv``. Only
        ``predictive`` has several, and its convolutions read nothing but the previous map.
        """
        return previous if previous is None else self.before_last(_hide(previous, hidden), hidden)

    def extra_repr(self) -> str:
        shares = (("alpha", self.alpha), ("beta", self.beta))
        shown = [f"{name}={'learnt' if isinstance(share, Tensor) else f'{share:g}'}" for name, share in shares]
        return ", ".join([self.rule, self.geometry.value, *shown])


def is_always(share: Share, constant: float) -> bool:
    """Whether a share is this constant, and not a parameter that may come to be something else."""
    return not isinstance(share, Tensor) and share == constant


def _same(share: Share, other: Share) -> bool:
    """Whether two shares are always equal: the same parameter, or equal constants."""
    return share is other or (not isinstance(share, Tensor) and not isinstance(other, Tensor) and share == other)


def _weighted(of_previous: Share, previous: Tensor | None, of_logits: Share, logits: Tensor) -> Tensor:
    """of_previous * previous + of_logits * logits"""
    if previous is None or is_always(of_previous, 0):
        return logits if is_always(of_logits, 1) else of_logits * logits
    if not isinstance(of_previous, Tensor) and of_previous + of_logits == 1:
        return torch.lerp(logits, previous.type_as(logits), of_previous)  # under autocast their types may differ
    return of_previous * previous + of_logits * logits


def _hide(maps: Tensor, hidden: Tensor | None) -> Tensor:
    return maps if hidden is None else maps.masked_fill(hidden, 0)


def finite(maps: Tensor) -> Tensor:
    """Keep half-precision sums out of infinity, from which the next layer would make NaN.

    Half of the range, so that masked logits, which are set to its end, stay the lowest.
    """
    if maps.dtype != torch.float16:
        return maps
    limit = torch.finfo(torch.float16).max / 2
    return maps.clamp(-limit, limit)
