"""The GPU's kernels for tests: in Triton's interpreter where there is no GPU."""

import contextlib
import functools
import os
from collections.abc import Iterator

import pytest
import torch


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Without a GPU, code in this block imports Triton and makes kernels for the interpreter; other code must not."""
    before = os.environ.get("TRITON_INTERPRET")
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("TRITON_INTERPRET", None)
        else:
            os.environ["TRITON_INTERPRET"] = before


def import_triton():
    """Triton decides on its interpreter when it is imported, which PyTorch does where tests ask for other things."""
    with interpreted(), contextlib.suppress(ImportError):
        import triton.language  # noqa: F401


def import_kernels():
    """The GPU's kernels, the operation that launches them, and their trial."""
    with interpreted():
        pytest.importorskip("triton")
        from evolving_attention.kernels.gpu import kernels, operation, trial
    return kernels, operation, trial


def interpret_quickly(monkeypatch):
    """Leave out work that Triton's interpreter does anew in every call of a function, which is a third of its time.

    It patches Triton's language for each call; for the first call of a launch is enough. And each operation looks up
    NumPy's name of a type in a dictionary that it makes for the purpose.
    """
    from triton.runtime import interpreter

    patch, launch, patched = interpreter._patch_lang, interpreter.GridExecutor.__call__, set()

    def patch_once(function):
        namespace = id(function.__globals__)
        if namespace in patched:
            return None
        patched.add(namespace)
        return patch(function)

    def launch_anew(self, *arguments, **options):
        patched.clear()
        return launch(self, *arguments, **options)

    monkeypatch.setattr(interpreter, "_patch_lang", patch_once)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch_anew)
    slow, tl = interpreter._get_np_dtype, interpreter.tl
    of_number = functools.cache(slow)

    def numpys_type(given):
        element = given.element_ty if isinstance(given, tl.block_type) else given
        return of_number(element) if type(element) is tl.dtype else slow(element)

    monkeypatch.setattr(interpreter, "_get_np_dtype", numpys_type)
