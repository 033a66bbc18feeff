"""Masks: their combination, their summand of the logits, the softmax under them.

Axes: B batch, T target (query) length, S source (key) length, K heads. Masks: True = masked.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

#: In a float mask, entries up to this one are masked: fairseq writes -1e4, -1e8 or -inf. Larger ones are added.
MASKED_FROM = -9e3


def combine(
    key_padding_mask: Tensor | None, attn_mask: Tensor | None, heads: int = 1
) -> tuple[Tensor | None, Tensor | None]:
    """The keys that the softmax must not see, bool, and a summand of the logits.

    Both broadcast to B x K x T x S, or are None.

    Args:
        key_padding_mask: B x S; anything but zero = masked.
        attn_mask: T x S, (B K) x T x S, or of four axes that broadcast to B x K x T x S. Floats up to ``MASKED_FROM``
            are masked, and others are added; of any other type, anything but zero is masked.
        heads: K.
    """
    masked = None if key_padding_mask is None else _as_bool(key_padding_mask[:, None, None, :])
    if attn_mask is None:
        return masked, None
    if attn_mask.dim() not in (2, 3, 4):
        raise ValueError(f"attn_mask must be T x S, (B K) x T x S or B x K x T x S, not {tuple(attn_mask.shape)}")
    if attn_mask.dim() < 4:
        attn_mask = attn_mask.unflatten(0, (-1, heads)) if attn_mask.dim() == 3 else attn_mask[None, None]
    added = None
    if attn_mask.is_floating_point():
        hides = attn_mask <= MASKED_FROM
        added = attn_mask.masked_fill(hides, 0)
    else:
        hides = _as_bool(attn_mask)
    return hides if masked is None else masked | hides, added


def _as_bool(mask: Tensor) -> Tensor:
    """A mask as bool; compiled, it is new: Inductor fails at some views of changing size that the way back needs."""
    return mask.ne(0) if torch.compiler.is_compiling() else mask.bool()


def hide_rows(masked: Tensor | None, query_padding: Tensor | None) -> Tensor | None:
    """The places where the convolution must see zero: ``masked``, and the rows of padded queries, B x T."""
    if query_padding is None:
        return masked
    rows = _as_bool(query_padding[:, None, :, None])
    return rows if masked is None else masked | rows


def masked_softmax(a_logit: Tensor, masked: Tensor | None) -> Tensor:
    """Mask and softmax, at least in float32: B x K x T x S."""
    if masked is not None:
        # The lowest number, not -inf: the same zeros after the softmax, and no NaN in a row that is all masked.
        a_logit = a_logit.masked_fill(masked, torch.finfo(a_logit.dtype).min)
    return F.softmax(a_logit, dim=-1, dtype=torch.promote_types(a_logit.dtype, torch.float32))


def future(rows: int, columns: int, device: torch.device) -> Tensor:
    """The keys after each of the last ``rows`` of ``columns`` positions: T x S."""
    return torch.ones(rows, columns, dtype=torch.bool, device=device).triu(columns - rows + 1)
