"""What attention must not see: masks as fairseq gives them, what they add to the logits, the softmax under them.

Axes: B batch, T target (query) length, S source (key) length, K heads. Masks: True = masked.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

#: In a float mask, what is at most this is masked: fairseq writes -1e4, -1e8 or -inf. Anything else is added.
MASKED_FROM = -9e3


def combine(key_padding_mask: Tensor | None, attn_mask: Tensor | None) -> Tensor | None:
    """What the softmax must not see: bool that broadcasts to B x K x T x S, or None.

    Args:
        key_padding_mask: B x S; anything but zero = masked.
        attn_mask: T x S. Of floats, what is at most ``MASKED_FROM`` is masked, and ``additive`` gives the rest; of any
            other type, anything but zero is masked.
    """
    masked = None if key_padding_mask is None else key_padding_mask.bool()[:, None, None, :]
    if attn_mask is None:
        return masked
    if attn_mask.dim() != 2:
        raise ValueError(f"attn_mask must be T x S, and has the shape {tuple(attn_mask.shape)}")
    attn_mask = (attn_mask <= MASKED_FROM if attn_mask.is_floating_point() else attn_mask.bool())[None, None]
    return attn_mask if masked is None else masked | attn_mask


def additive(attn_mask: Tensor | None) -> Tensor | None:
    """What a mask of floats adds to the logits, T x S; None for masks of another type, which add nothing."""
    if attn_mask is None or not attn_mask.is_floating_point():
        return None
    return attn_mask.masked_fill(attn_mask <= MASKED_FROM, 0)


def masked_softmax(a_logit: Tensor, masked: Tensor | None) -> Tensor:
    """Mask and softmax, at least in float32: B x K x T x S."""
    if masked is not None:
        # The lowest number, not -inf: the same zeros after the softmax, and no NaN in a row that is all masked.
        a_logit = a_logit.masked_fill(masked, torch.finfo(a_logit.dtype).min)
    return F.softmax(a_logit, dim=-1, dtype=torch.promote_types(a_logit.dtype, torch.float32))


def append_padding(before: Tensor | None, now: Tensor | None, old_keys: Tensor, new: int) -> Tensor | None:
    """Padding mask of all positions, B x S, from those of the earlier and of the ``new`` ones; None = no padding."""
    if before is None and now is None:
        return None
    batch, device = old_keys.size(0), old_keys.device
    if before is None:
        before = torch.zeros(batch, old_keys.size(2), dtype=torch.bool, device=device)
    if now is None:
        now = torch.zeros(batch, new, dtype=torch.bool, device=device)
    return torch.cat([before, now], dim=1)
