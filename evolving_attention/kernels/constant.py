"""Functions whose results torch.compile takes for constants."""

from collections.abc import Callable
from typing import TypeVar

Function = TypeVar("Function", bound=Callable)


def constant(function: Function) -> Function:
    """As torch.compiler.assume_constant_result, without its import of the compiler, which takes a second or two."""
    function._dynamo_marked_constant = True
    return function
