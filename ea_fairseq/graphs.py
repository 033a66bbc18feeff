"""CUDA graphs: work that is recorded once and replayed in the same memory; and what no graph can repeat."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from .private import TorchDispatchMode

#: operations whose result the host waits for
READS = frozenset(
    "_local_scalar_dense item nonzero is_nonzero equal masked_select _unique2 unique_dim unique_consecutive".split()
)


#: PyTorch allows one capture at a time in a process. Threads that share a model may begin searches at once.
_CAPTURE = threading.Lock()


class HostRead(RuntimeError):
    """The host asks for numbers of the device, which no graph can repeat."""


class NoReads(TorchDispatchMode):
    """Refuses, as a capture does, host reads and shapes that depend on numbers; but it names them."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name == "index" and any(x is not None and x.dtype == torch.bool for x in args[1])
        if name in READS or by_mask:
            raise HostRead(f"the model or the criterion looks at numbers ({name})")
        return func(*args, **(kwargs or {}))


class Graph(Protocol):
    """A recording of work."""

    def aside(self) -> Any:
        """A context for what runs before a capture: libraries take their memory, and kernels have their trial."""

    def capture(self) -> Any:
        """A context whose work is recorded."""

    def replay(self) -> None:
        """Repeat that work, in the same memory."""


class Pool:
    """Memory that graphs share, with the one stream of their captures: PyTorch's memory belongs to a stream.

    Such graphs must not run at the same time, and each may write over what another has left.
    """

    def __init__(self) -> None:
        self.handle, self.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()


class CudaGraph:
    """A CUDA graph. By default its memory is its own."""

    def __init__(self, pool: Pool | None = None) -> None:
        self._graph, self._pool = torch.cuda.CUDAGraph(), pool or Pool()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """See ``Graph``."""
        stream = self._pool.stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield
        torch.cuda.current_stream().wait_stream(stream)

    @contextmanager
    def capture(self) -> Iterator[None]:
        """See ``Graph``. Other threads may call CUDA meanwhile, as to load data, but not capture."""
        graph, pool = self._graph, self._pool
        with _CAPTURE, torch.cuda.graph(graph, pool.handle, pool.stream, capture_error_mode="thread_local"):
            yield

    def replay(self) -> None:
        """See ``Graph``."""
        self._graph.replay()


def for_device(device: torch.device) -> Callable[[], Graph] | None:
    """Makes a new graph for this device; None where there are none."""
    return CudaGraph if device.type == "cuda" else None
