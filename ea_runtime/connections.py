"""uvicorn's HTTP protocol with the bounds that it lacks: on connections, and on the time that each may take.

uvicorn 0.54 times only the pause between two requests. A client that never ends its headers, or never reads its
answer, would hold a connection for good.
"""

from __future__ import annotations

import asyncio
import resource
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

#: The most connections that asyncio accepts in one turn of its loop, before the server can count them.
ACCEPTED = 16
#: File descriptors that are kept for the rest: some turns' connections, and the process's own files.
RESERVED = 100


def protocol(most: int, idle: float, busy: float) -> type[asyncio.Protocol]:
    """The protocol for uvicorn's setting `http`.

    Args:
        most: connections; fewer where the process may open few files. A further one takes the place of the one that
            has waited longest for its client, if any waits.
        idle: seconds until the headers of a request are complete.
        busy: seconds from there until its answer has been sent.
    """
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY:
        most = max(1, min(most, files - RESERVED))

    class Bounded(H11Protocol):
        """A connection that ends in time whatever its client does."""

        def __init__(self, *arguments: Any, **more: Any) -> None:
            super().__init__(*arguments, **more)
            self._began, self._deadline = self.loop.time(), self.loop.call_later(idle, self.end)

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > most:
                bounded = [one for one in self.connections if isinstance(one, Bounded)]
                min(bounded, key=lambda one: (one._is_served(), one._began)).end()

        def connection_lost(self, exc: Exception | None) -> None:
            self._deadline.cancel()
            super().connection_lost(exc)

        def handle_events(self) -> None:
            before = self.cycle
            super().handle_events()
            if self.cycle is not before:
                self._end_in(busy)

        def on_response_complete(self) -> None:
            # an answer that has not left may take as long as another request
            self._end_in(busy if self.transport.get_write_buffer_size() else idle)
            super().on_response_complete()

        def _end_in(self, seconds: float) -> None:
            self._deadline.cancel()
            self._began, self._deadline = self.loop.time(), self.loop.call_later(seconds, self.end)

        def _is_served(self) -> bool:
            """Whether its request is complete, and its answer is not; else the server waits for the client."""
            return bool(self.cycle and not self.cycle.more_body and not self.cycle.response_complete)

        def end(self) -> None:
            """Close the connection without waiting for an answer to be sent."""
            self.connections.discard(self)
            self.transport.abort()

    return Bounded
