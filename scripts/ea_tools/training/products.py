"""Matrix products of float32 numbers in the units for bfloat16 that some CPUs have."""

from __future__ import annotations

from pathlib import Path

from ea_artifacts.command import UserError

#: The flag of ea_tools.training.fairseq_train that asks for them.
FLAG = "bf16-products"
#: Linux's names of the units: AVX-512's and AMX's on x86, and ARM's.
UNITS = {"avx512_bf16", "amx_bf16", "bf16"}


def has_bf16_units(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this machine's CPU multiplies bfloat16 numbers itself, as far as the system says."""
    return bool(UNITS & set(cpuinfo.read_text(encoding="utf-8", errors="replace").split()))


def require_bf16_units() -> None:
    """Refuse --precision bf16 on a CPU that would round without being faster."""
    if not has_bf16_units():
        raise UserError(
            "--precision bf16: this CPU has no units for bfloat16 (avx512_bf16 or amx_bf16 in /proc/cpuinfo); take fp32"
        )


def use_bf16_products(wanted: bool = True) -> None:
    """Let PyTorch round the factors of float32 matrix products to bfloat16, or no more; sums stay in float32.

    Weights, gradients, the optimizer and evolving attention's own kernel are float32 either way.
    """
    import torch  # here: its import takes seconds, and planning a training needs none of it

    # PyTorch's hints leave it out
    torch.backends.mkldnn.matmul.fp32_precision = "bf16" if wanted else "ieee"  # type: ignore[attr-defined]
