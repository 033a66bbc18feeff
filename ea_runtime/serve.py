"""An exported model over HTTP: `python -m ea_runtime DIR --serve [HOST:]PORT`.

``POST /translate`` translates lines, ``GET /health`` describes the model, ``/`` is a page for people.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import HTMLResponse
from pydantic import BaseModel, FailFast, Field, ValidationError
from starlette.requests import ClientDisconnect

from ea_runtime import __version__
from ea_runtime.connections import ACCEPTED, protocol
from ea_runtime.search import Settings, check_n_best, check_whole
from ea_runtime.translator import EOS, Translator

logger = logging.getLogger(__name__)

#: Seconds that an idle server waits for more lines before it translates the first.
TOGETHER = 0.002
#: The fixed part of a line's work, in subwords.
FIXED = 20
#: Connections that the system holds until the server accepts them.
BACKLOG = 1024
#: The page loads nothing from elsewhere; this header lets the browser enforce that.
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:"
#: A limit in numbers, and one in time.
Count = Annotated[int, Field(ge=1, le=1_000_000_000)]
Seconds = Annotated[float, Field(ge=0.001, le=1_000_000)]
#: Ends a request that no client waits for any more; uvicorn drops the answer.
GONE = (499, "the client has closed the connection")


class Limits(BaseModel, frozen=True, extra="forbid", strict=True):
    """The most that the server accepts; everything above is refused with a status and a sentence."""

    #: open together
    connections: Count = 200
    #: until the headers of a request are complete
    headers: Seconds = 10.0
    #: of a request's body
    bytes: Count = 250_000
    #: of a request
    lines: Count = 100
    #: of a request's lines together
    total_letters: Count = 25_000
    #: of a line
    words: Count = 250
    #: of a line
    letters: Count = 2_500
    #: of a word, by spaces; the time that subwords take grows with the square of its length
    word_letters: Count = 500
    #: width of the search; also where a request sets none
    beam: Count = 20
    #: of a line, beam x (subwords + FIXED); one call of the translator, which nothing can interrupt, has twice as much
    work: Count = 1_500
    #: lines of all requests that wait for the translator
    waiting: Count = 1_000
    #: from a request's arrival to its answer
    seconds: Seconds = 30.0


class Asked(BaseModel, extra="forbid", strict=True):
    """The body of POST /translate. None stands for the export's setting."""

    lines: Annotated[list[str], FailFast()]
    beam: int | None = None
    lenpen: float | None = None
    n_best: int = 1


class Translation(BaseModel):
    """One translation of a line."""

    text: str
    score: float


class Answer(BaseModel):
    """n_best translations of each line, best first; "" with score 0 of an empty line."""

    translations: list[list[Translation]]
    #: "waiting" until the translator took the first line, "translating" until it ended the last
    seconds: dict[str, float]


@dataclass(eq=False)
class Line:
    """A line that waits for the translator."""

    #: the end of the sentence included
    ids: list[int]
    settings: Settings
    n_best: int
    #: hypotheses, and when the translator began and ended
    answer: asyncio.Future[tuple[list[tuple[str, float]], float, float]] = field(default_factory=asyncio.Future)
    #: the number of its request, and when it has its turn on the clock of ``Batches``
    request: int = 0
    due: float = 0

    @property
    def work(self) -> int:
        """See ``Limits.work``."""
        return self.settings.beam * (len(self.ids) - 1 + FIXED)


class Batches:
    """Translates lines of all requests, those of the same settings in one call.

    Lines that arrive during a call are the next call's batch. Requests get equal shares of the translator. A clock
    counts each one's share; a line's turn comes when the clock reaches the work of its request so far. So a small
    request passes large ones, and none waits for ever.
    """

    def __init__(self, translator: Translator, batch: int, work: int) -> None:
        self._translator, self._batch, self._work = translator, batch, work
        self._thread = ThreadPoolExecutor(1)  # not the checks': translations must not wait for those of many requests
        self._lines: list[Line] = []
        self._requests, self._clock = itertools.count(), 0.0
        self._arrived = asyncio.Event()
        #: lines that are still being checked
        self.checked = 0

    @property
    def waiting(self) -> int:
        """The number of lines that wait."""
        return self.checked + sum(not line.answer.done() for line in self._lines)

    def add(self, lines: list[Line]) -> None:
        """Translate the lines of a request. Cancel a line's answer to take the line back."""
        request = next(self._requests)
        for line, total in zip(lines, itertools.accumulate(line.work for line in lines), strict=True):
            line.request, line.due = request, self._clock + total
        self._lines += lines
        self._arrived.set()

    async def run(self) -> None:
        """Translate until this task is cancelled."""
        while True:
            if not self._lines:
                self._arrived.clear()
                await self._arrived.wait()
                await asyncio.sleep(TOGETHER)
            if lines := self._next():
                await self._translate(lines)

    def end(self) -> None:
        """Wait for a call that still runs."""
        self._thread.shutdown()

    def _next(self) -> list[Line]:
        """The line whose turn it is, and others with its settings."""
        waiting = sorted((line for line in self._lines if not line.answer.done()), key=lambda line: line.due)
        alike = [line for line in waiting if line.settings == waiting[0].settings]
        totals = list(itertools.accumulate(line.work for line in alike))
        lines = alike[: min(self._batch, sum(total <= 2 * self._work for total in totals))]
        self._lines = [line for line in waiting if line not in lines]
        if lines:
            self._clock += totals[len(lines) - 1] / len({line.request for line in waiting})
        return lines

    async def _translate(self, lines: list[Line]) -> None:
        ids, settings, n_best = [line.ids for line in lines], lines[0].settings, max(line.n_best for line in lines)
        began = time.monotonic()
        try:
            translate = partial(self._translator.scored_ids, ids, settings, n_best, self._batch)
            translations = await asyncio.get_running_loop().run_in_executor(self._thread, translate)
        except Exception as error:
            # A line that fails must not cost the others their answers.
            for line in lines if len(lines) > 1 else []:
                if not line.answer.done():
                    await self._translate([line])
            if len(lines) == 1 and not lines[0].answer.done():
                lines[0].answer.set_exception(error)
            return
        for line, hypotheses in zip(lines, translations, strict=True):
            if not line.answer.done():
                line.answer.set_result((hypotheses[: line.n_best], began, time.monotonic()))


def application(translator: Translator, limits: Limits, batch: int) -> FastAPI:
    """The server as an ASGI application.

    Args:
        translator: the model.
        limits: on requests.
        batch: the most lines of one call of the translator.

    Raises:
        ValueError: batch is below 1.
    """
    check_whole("batch", batch)
    batches = Batches(translator, batch, limits.work)
    checker = ThreadPoolExecutor(1)  # a line of each request in turn
    page = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    languages = dict(zip(("source", "target"), translator.text.preparation.languages, strict=True))

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        running = asyncio.create_task(batches.run())
        yield
        running.cancel()
        batches.end()
        checker.shutdown()

    # FastAPI's pages of documentation load scripts from elsewhere.
    app = FastAPI(title="ea_runtime", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    schema = {"requestBody": {"required": True, "content": {"application/json": {"schema": Asked.model_json_schema()}}}}

    async def answered(body: bytes, arrived: float) -> Answer:
        check = partial(asyncio.get_running_loop().run_in_executor, checker)
        asked, settings = _checked(body, translator, limits)
        if batches.waiting + len(asked.lines) > limits.waiting:
            sentence = f"the queue is full ({batches.waiting} lines); try again soon"
            raise HTTPException(503, sentence, {"Retry-After": "1"})
        lines = []
        batches.checked += len(asked.lines)
        try:
            for number, text in enumerate(asked.lines, 1):
                ids = await check(_encoded, text, number, settings.beam, translator, limits)
                lines.append(Line([*ids, EOS], settings, asked.n_best))
        finally:
            batches.checked -= len(asked.lines)
        batches.add(lines)
        results = await _answers(lines)
        began = min((began for _, began, _ in results), default=arrived)
        ended = max((ended for _, _, ended in results), default=arrived)
        return Answer(
            translations=[[Translation(text=text, score=score) for text, score in best] for best, _, _ in results],
            seconds={"waiting": round(began - arrived, 6), "translating": round(ended - began, 6)},
        )

    @app.post("/translate", openapi_extra=schema)
    async def translate(request: Request) -> Answer:
        arrived, body = time.monotonic(), None
        try:
            async with asyncio.timeout(limits.seconds):
                body = await _body(request, limits.bytes)
                return await _unless_gone(request, answered(body, arrived))
        except TimeoutError:
            if body is None:
                raise HTTPException(408, f"the request was not complete after {limits.seconds:g} seconds") from None
            sentence = f"no answer within {limits.seconds:g} seconds; send fewer lines, or try again later"
            raise HTTPException(503, sentence, {"Retry-After": "1"}) from None

    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "ok", **languages, "waiting": batches.waiting}

    async def index(_: Request) -> HTMLResponse:
        return HTMLResponse(page, headers={"Content-Security-Policy": POLICY})

    app.add_route("/", index, include_in_schema=False)
    return app


async def _body(request: Request, most: int) -> bytes:
    """The body of a request.

    Raises:
        HTTPException: it is too large, or not of type JSON, or the client closed the connection.
    """
    # Other sites' pages cannot send this type without leave, so that they cannot use a person's local server.
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise HTTPException(415, "send JSON, and the header Content-Type: application/json")
    body, size = bytearray(), 0
    try:
        async for part in request.stream():
            size += len(part)
            # The rest is read and dropped: many clients see no answer before they have sent everything.
            body += part if size <= most else b""
    except ClientDisconnect:
        raise HTTPException(*GONE) from None
    if size > most:
        raise HTTPException(413, f"the body has {size} bytes, but at most {most} may come in one request")
    return bytes(body)


def _checked(body: bytes, translator: Translator, limits: Limits) -> tuple[Asked, Settings]:
    """The content of a body, and its settings, with the export's where it has none.

    Raises:
        HTTPException: it is none that the translator takes, or above a limit that can be seen without splitting words.
    """
    try:
        asked = Asked.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "body"
        if first["loc"][:1] == ("lines",) and len(first["loc"]) > 1:
            where = f"line {int(first['loc'][1]) + 1}"
        raise HTTPException(400 if first["type"] == "json_invalid" else 422, f"{where}: {first['msg']}") from None
    if len(asked.lines) > limits.lines:
        raise HTTPException(413, f"{len(asked.lines)} lines, but at most {limits.lines} may come in one request")
    if (letters := sum(map(len, asked.lines))) > limits.total_letters:
        raise HTTPException(413, f"{letters} letters, but at most {limits.total_letters} may come in one request")
    for number, line in enumerate(asked.lines, 1):
        words = line.split()
        for count, most, unit in (
            (len(words), limits.words, "words, but a line"),
            (len(line), limits.letters, "letters, but a line"),
            (max(map(len, words), default=0), limits.word_letters, "letters in a word, but a word"),
        ):
            if count > most:
                raise HTTPException(413, f"line {number}: {count} {unit} may have at most {most}")
    beam = min(translator.settings({}).beam, limits.beam) if asked.beam is None else asked.beam
    if beam > limits.beam:
        raise HTTPException(422, f"beam: at most {limits.beam}, not {beam}")
    try:
        settings = translator.settings({"beam": beam, "lenpen": asked.lenpen})
        check_n_best(asked.n_best, beam)
    except ValueError as error:
        raise HTTPException(422, str(error)) from None
    return asked, settings


def _encoded(line: str, number: int, beam: int, translator: Translator, limits: Limits) -> list[int]:
    """Ids of a line's subwords.

    Raises:
        HTTPException: the line is several, or too long.
    """
    try:
        ids = translator.encode(line, f"line {number}")
    except ValueError as error:
        raise HTTPException(422, str(error)) from None
    for most, reason in (
        (translator.room, "the model reads at most"),
        (limits.work // beam - FIXED, f"with beam {beam} a line may have at most"),
    ):
        if len(ids) > most:
            raise HTTPException(413, f"line {number}: {len(ids)} subwords, but {reason} {most}")
    return ids


async def _answers(lines: list[Line]) -> list[tuple[list[tuple[str, float]], float, float]]:
    """The answers of all lines, which are taken back when this task is cancelled.

    Raises:
        HTTPException: the translator failed.
    """
    try:
        return await asyncio.gather(*(line.answer for line in lines))
    except Exception:
        logger.exception("the translation of %d lines failed", len(lines))
        raise HTTPException(500, "the translation failed; the server's log has the reason") from None
    finally:
        for line in lines:
            line.answer.cancel()


async def _unless_gone(request: Request, work: Coroutine[Any, Any, Answer]) -> Answer:
    """The result of the work, which is cancelled when the client goes or this task is cancelled.

    Raises:
        HTTPException: the client has gone.
    """
    tasks = working, _ = asyncio.create_task(work), asyncio.create_task(_gone(request))
    # Else asyncio logs a refusal that comes together with the end of its time.
    working.add_done_callback(lambda done: done.cancelled() or done.exception())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise HTTPException(*GONE)
        return working.result()
    finally:
        for task in tasks:
            task.cancel()


async def _gone(request: Request) -> None:
    """Return when the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


class Server(uvicorn.Server):
    """uvicorn's server of an application at a socket.

    The first signal ends it when the requests that run are answered, the second closes their connections.

    Args:
        translator, limits, batch: see ``application``.
        listener: the socket.
        started: called with the address once a signal ends the server in order.
    """

    def __init__(
        self,
        translator: Translator,
        listener: socket.socket,
        limits: Limits | None,
        batch: int = 32,
        started: Callable[[str], None] = lambda address: None,
    ) -> None:
        limits = limits or Limits()
        bounded = protocol(limits.connections, limits.headers, limits.seconds + limits.headers)
        app = application(translator, limits, batch)
        config = uvicorn.Config(
            app, http=bounded, ws="none", backlog=ACCEPTED, log_level="error", access_log=False, server_header=False
        )
        super().__init__(config)
        self._listener, self._started = listener, started
        #: of `started`
        self.fault: BaseException | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._listener.listen(BACKLOG)
        host, port = self._listener.getsockname()[:2]
        try:
            self._started(f"http://{f'[{host}]' if ':' in host else host}:{port} (Ctrl-C ends it)")
        except BaseException as error:  # else uvicorn logs how its tasks are cancelled
            self.fault, self.should_exit = error, True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.should_exit:
            super().handle_exit(sig, frame)
            return
        connections: Any = list(self.server_state.connections)  # of connections.protocol
        for connection in connections:
            asyncio.get_running_loop().call_soon_threadsafe(connection.end)


def serve(
    translator: Translator,
    address: str,
    limits: Limits | None = None,
    batch: int = 32,
    started: Callable[[str], None] = lambda address: print(address, flush=True),
) -> None:
    """Answer requests until Ctrl-C or SIGTERM; those that run then are still answered.

    Args:
        translator: the model.
        address: [HOST:]PORT; without HOST this machine alone can connect. Port 0 stands for any free one.
        limits, batch: see ``application``.
        started: called with the address; by default it is printed.

    Raises:
        ValueError: the address is none, or its port is in use.
    """
    with _listener(address) as listener:
        # uvicorn ends its requests, then raises the signal again.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        server = Server(translator, listener, limits, batch, started)
        with contextlib.suppress(KeyboardInterrupt):
            server.run(sockets=[listener])
        if server.fault:
            raise server.fault


def _listener(address: str) -> socket.socket:
    """A socket that listens at [HOST:]PORT; HOST of IPv6 stands in brackets."""
    host, _, port = address.rpartition(":")
    if not (port.isascii() and port.isdecimal() and int(port) < 65536):
        raise ValueError(f"--serve {address}: expected [HOST:]PORT, such as 8000 or 0.0.0.0:8000")
    try:
        family, *_, place = socket.getaddrinfo(host.strip("[]") or "127.0.0.1", int(port), type=socket.SOCK_STREAM)[0]
        return socket.create_server(place[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        raise ValueError(f"--serve {address}: {error.strerror}; choose another address") from None
    except UnicodeError:
        raise ValueError(f"--serve {address}: a host's name has at most 63 letters between dots") from None
