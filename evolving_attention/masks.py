"""Masks: their combination, their summand of the logits, the softmax under them.

Axes: B batch, T target (query) length, S source (key) length, K heads. Masks: True = masked.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

#: In a float mask, entries up to this one are masked: fairseq writes -1e4, -1e8 or -inf. Larger ones are added.
MASKED_FROM = -9e3


def combine(key_padding_mask: Tensor | None, attn_mask: Tensor | None, heads: int = 1) -> Tensor | None:
    """The keys that the softmax must not see: bool that broadcasts to B x K x T x S, or None.

    Args:
        key_padding_mask: B x S; anything but zero = masked.
        attn_mask: T x S, (B K) x T x S, or of four axes that broadcast to B x K x T x S. Floats up to ``MASKED_FROM``
            are masked, and ``additive`` gives the rest; of any other type, anything but zero is masked.
        heads: K.
    """
    masked = None if key_padding_mask is None else key_padding_mask.bool()[:, None, None, :]
    if attn_mask is None:
        return masked
    attn_mask = _four_axes(attn_mask, heads)
    attn_mask = attn_mask <= MASKED_FROM if attn_mask.is_floating_point() else attn_mask.bool()
    return attn_mask if masked is None else masked | attn_mask


def additive(attn_mask: Tensor | None, heads: int = 1) -> Tensor | None:
    """The summand of the logits in a float mask, broadcasting to B x K x T x S; None for masks of another type."""
    if attn_mask is None or not attn_mask.is_floating_point():
        return None
    return _four_axes(attn_mask.masked_fill(attn_mask <= MASKED_FROM, 0), heads)


def hide_rows(masked: Tensor | None, query_padding: Tensor | None) -> Tensor | None:
    """The places where the convolution must see zero: ``masked``, and the rows of padded queries, B x T."""
    if query_padding is None:
        return masked
    rows = query_padding.bool()[:, None, :, None]
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


def _four_axes(mask: Tensor, heads: int) -> Tensor:
    if mask.dim() not in (2, 3, 4):
        raise ValueError(f"attn_mask must be T x S, (B K) x T x S or B x K x T x S, not {tuple(mask.shape)}")
    return mask.unflatten(0, (-1, heads)) if mask.dim() == 3 else mask if mask.dim() == 4 else mask[None, None]
