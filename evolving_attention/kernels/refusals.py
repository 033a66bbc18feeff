"""Why a kernel does not do a call."""

#: variants of GPU kernels that a capture met before their trial: it has recorded the plain composition in their place
untried: list[str] = []


def summary(error: Exception) -> str:
    """The first and the last line of an error: Triton's compiler gives the place first and the reason last."""
    lines = [line.strip() for line in f"{type(error).__name__}: {error}".splitlines() if line.strip()]
    return lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"
