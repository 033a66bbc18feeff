"""Parallel text in step: several files are read together, chunk by chunk, worked on by all cores, kept in order.

Memory is bounded: a chunk is at most CHUNK_LINES lines or about CHUNK_BYTES, and a few chunks per worker are in
flight.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from itertools import islice
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ea_artifacts.command import UserError

CHUNK_LINES = 4000
CHUNK_BYTES = 1 << 20

Chunk = tuple[list[bytes], ...]  # one list of lines for each file, all of one length


def tqdm_options() -> dict:
    """A log file needs few progress lines, and a short job none."""
    return {"delay": 1.0} | ({} if sys.stderr.isatty() else {"mininterval": 30.0})


def read_rows(paths: list[Path]) -> Iterator[tuple[bytes, ...]]:
    """The files' lines, in step. Raises ValueError if the files do not have the same number of lines."""
    with ExitStack() as stack:
        files = [stack.enter_context(path.open("rb", buffering=1 << 20)) for path in paths]
        yield from zip(*files, strict=True)


def chunks(rows: Iterator[tuple[bytes, ...]], what: str, total: int | None = None) -> Iterator[Chunk]:
    """Rows of lines as chunks. Shows a progress bar titled `what` that expects `total` rows."""
    with tqdm(total=total, desc=f"  {what}", unit=" lines", unit_scale=True, **tqdm_options()) as bar:
        while batch := list(_bounded(islice(rows, CHUNK_LINES))):
            yield tuple(map(list, zip(*batch, strict=True)))
            bar.update(len(batch))


def _bounded(rows: Iterator[tuple[bytes, ...]]) -> Iterator[tuple[bytes, ...]]:
    size = 0
    for row in rows:
        yield row
        size += sum(map(len, row))
        if size > CHUNK_BYTES:
            return


def ordered_map(function: Callable[[Chunk], Any], source: Iterator[Chunk], workers: int) -> Iterator[tuple[Chunk, Any]]:
    """Yields (chunk, function(chunk[:2])) in order: files after the first two stay here, and only keep in step.

    `function` goes to each worker once, not with every chunk.
    """
    if workers == 1:
        for chunk in source:
            yield chunk, function(chunk[:2])
        return
    with ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), _start_worker, (function,)) as pool:
        pending: deque = deque()
        try:
            for chunk in source:
                pending.append((chunk, pool.submit(_work, chunk[:2])))
                if len(pending) > 3 * workers:
                    done, future = pending.popleft()
                    yield done, future.result()
            while pending:
                done, future = pending.popleft()
                yield done, future.result()
        except BrokenProcessPool as error:
            raise UserError(
                "one of the worker processes was killed, probably for want of memory; run it again with fewer --workers"
            ) from error
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


_function: Callable[[Chunk], Any]


def _start_worker(function: Callable[[Chunk], Any]) -> None:
    global _function
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent ends its workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _function, parent = function, multiprocessing.parent_process()
    assert parent, "a worker has one"

    def leave_with_parent() -> None:  # a killed parent sends no message; without this its workers would wait forever
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=leave_with_parent, daemon=True).start()


def _work(chunk: Chunk) -> Any:
    return _function(chunk)
