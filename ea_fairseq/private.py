"""Names of PyTorch without a public form that this package needs; see also ``evolving_attention.private``."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["TorchDispatchMode", "check", "fused_adamw"]

#: tells a tracer which sizes are equal
check = torch._check
#: an update of Adam in one kernel, which PyTorch's own optimizer calls
fused_adamw = torch._fused_adamw_
