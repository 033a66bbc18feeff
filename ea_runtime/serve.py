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
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import HTMLResponse
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from ea_runtime.search import check_whole
from ea_runtime.translator import Translator

logger = logging.getLogger(__name__)

#: Seconds that an idle server waits for more lines before it translates the first.
TOGETHER = 0.002
#: Letters times beam of one call, above which further lines wait for the next: nothing can interrupt a call.
WORK = 50_000
#: The page loads nothing from elsewhere; this header lets the browser enforce that.
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:"


#: Ends a request that no client waits for any more; uvicorn drops the answer.
GONE = (499, "the client has closed the connection")


@dataclass(frozen=True)
class Limits:
    """The most that the server accepts; everything above is refused with a status and a sentence."""

    #: of a request's body
    bytes: int = 1_000_000
    #: of a request
    lines: int = 100
    #: of a line
    words: int = 250
    #: of a line; the text tools take long for one word of many letters
    letters: int = 2_500
    #: width of the search
    beam: int = 20
    #: lines of all requests that wait for the translator
    waiting: int = 1_000
    #: from a request's arrival to its answer
    seconds: float = 30.0


class Asked(BaseModel, extra="forbid", strict=True):
    """The body of POST /translate. None stands for the export's setting."""

    lines: list[str]
    beam: int | None = None
    lenpen: float | None = None
    n_best: int = 1


class Translation(BaseModel):
    """One translation of a line."""

    text: str
    score: float


class Answer(BaseModel):
    """n_best translations of each line, best first; none of an empty line."""

    translations: list[list[Translation]]
    #: "waiting" until the translator took the first line, "translating" until it ended the last
    seconds: dict[str, float]


@dataclass(eq=False)
class Line:
    """A line that waits for the translator."""

    request: Request
    text: str
    beam: int
    lenpen: float
    n_best: int
    #: hypotheses, and when the translator began and ended
    answer: asyncio.Future[tuple[list[tuple[str, float]], float, float]] = field(default_factory=asyncio.Future)


class Batches:
    """Translates lines of all requests, those of the same settings in one call.

    Lines that arrive during a call are the next call's batch. Requests of more than one call take turns.
    """

    def __init__(self, translator: Translator, batch: int) -> None:
        self._translator, self._batch = translator, batch
        self._thread = ThreadPoolExecutor(1)  # of its own: checks of many requests must not keep translations waiting
        self._lines: list[Line] = []
        self._arrived = asyncio.Event()

    @property
    def waiting(self) -> int:
        """The number of lines that wait."""
        return sum(not line.answer.done() for line in self._lines)

    def add(self, lines: list[Line]) -> None:
        """Translate these lines. Cancel a line's answer to take the line back."""
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

    def _next(self) -> list[Line]:
        """The first line, and others with its settings. The other lines of their requests go to the end."""
        waiting = [line for line in self._lines if not line.answer.done()]
        alike = [line for line in waiting if (line.beam, line.lenpen) == (waiting[0].beam, waiting[0].lenpen)]
        totals = itertools.accumulate(len(line.text) * line.beam for line in alike)
        lines = alike[: min(self._batch, max(1, sum(total <= WORK for total in totals)))]
        served = {line.request for line in lines}
        self._lines = sorted((line for line in waiting if line not in lines), key=lambda line: line.request in served)
        return lines

    async def _translate(self, lines: list[Line]) -> None:
        texts, first, n_best = [line.text for line in lines], lines[0], max(line.n_best for line in lines)
        began = time.monotonic()
        try:
            translate = partial(self._translator.scored, batch=self._batch)
            arguments = (texts, first.beam, first.lenpen, n_best)
            translations = await asyncio.get_running_loop().run_in_executor(self._thread, translate, *arguments)
        except Exception as error:
            # A line that fails must not cost the others their answers.
            for line in lines if len(lines) > 1 else []:
                if not line.answer.done():
                    await self._translate([line])
            if len(lines) == 1 and not first.answer.done():
                first.answer.set_exception(error)
            return
        for line, hypotheses in zip(lines, translations, strict=True):
            if not line.answer.done():
                line.answer.set_result((hypotheses[: line.n_best], began, time.monotonic()))


def application(translator: Translator, limits: Limits | None = None, batch: int = 32) -> FastAPI:
    """The server as an ASGI application.

    Args:
        translator: the model.
        limits: on requests.
        batch: the most lines of one call of the translator.

    Raises:
        ValueError: batch is below 1.
    """
    limits = limits or Limits()
    check_whole("batch", batch)
    batches = Batches(translator, batch)
    page = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    languages = {side: translator.text.prep[f"{side}_lang"] for side in ("source", "target")}

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        running = asyncio.create_task(batches.run())
        yield
        running.cancel()

    # FastAPI's pages of documentation load scripts from elsewhere.
    app = FastAPI(title="ea_runtime", lifespan=lifespan, docs_url=None, redoc_url=None)
    schema = {"requestBody": {"required": True, "content": {"application/json": {"schema": Asked.model_json_schema()}}}}

    @app.post("/translate", openapi_extra=schema)
    async def translate(request: Request) -> Answer:
        arrived, body = time.monotonic(), None
        try:
            async with asyncio.timeout(limits.seconds):
                body = await _body(request, limits.bytes)
                asked = await asyncio.to_thread(_checked, body, translator, limits)
                lines = [Line(request, text, asked.beam, asked.lenpen, asked.n_best) for text in asked.lines]
                if batches.waiting + len(lines) > limits.waiting:
                    sentence = f"{batches.waiting} lines wait already, and at most {limits.waiting} may; try again soon"
                    raise HTTPException(503, sentence, {"Retry-After": "1"})
                batches.add(lines)
                results = await _answers(lines, request)
        except TimeoutError:
            if body is None:
                raise HTTPException(408, f"the request was not complete after {limits.seconds:g} seconds") from None
            sentence = f"no answer within {limits.seconds:g} seconds; send fewer lines, or try again later"
            raise HTTPException(503, sentence, {"Retry-After": "1"}) from None
        began = min((began for _, began, _ in results), default=arrived)
        ended = max((ended for _, _, ended in results), default=arrived)
        return Answer(
            translations=[[Translation(text=text, score=score) for text, score in best] for best, _, _ in results],
            seconds={"waiting": round(began - arrived, 6), "translating": round(ended - began, 6)},
        )

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "ok", **languages, "waiting": batches.waiting}

    @app.get("/", response_class=HTMLResponse)
    async def index() -> HTMLResponse:
        return HTMLResponse(page, headers={"Content-Security-Policy": POLICY})

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


def _checked(body: bytes, translator: Translator, limits: Limits) -> Asked:
    """The content of a body, with the export's settings where it has none.

    Raises:
        HTTPException: the body or a line is above a limit, or is none that the translator reads.
    """
    try:
        asked = Asked.model_validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "body"
        raise HTTPException(400 if first["type"] == "json_invalid" else 422, f"{where}: {first['msg']}") from None
    if len(asked.lines) > limits.lines:
        raise HTTPException(413, f"{len(asked.lines)} lines, but at most {limits.lines} may come in one request")
    if asked.beam is not None and asked.beam > limits.beam:
        raise HTTPException(422, f"beam: at most {limits.beam}, not {asked.beam}")
    try:
        translator.translate([], asked.beam, asked.lenpen, asked.n_best)  # all its checks, and no work
    except ValueError as error:
        raise HTTPException(422, str(error)) from None
    for number, line in enumerate(asked.lines, 1):
        _check_line(line, number, translator, limits)
    settings = translator.settings({"beam": asked.beam, "lenpen": asked.lenpen})
    return asked.model_copy(update={"beam": settings.beam, "lenpen": settings.lenpen})


def _check_line(line: str, number: int, translator: Translator, limits: Limits) -> None:
    """Raise HTTPException for a line that is too long, or is several."""
    if "\n" in line.rstrip("\n"):
        raise HTTPException(422, f"line {number}: it has a line break inside; give one sentence a line")
    if (words := len(line.split())) > limits.words:
        raise HTTPException(413, f"line {number}: {words} words, but a line may have at most {limits.words}")
    if len(line) > limits.letters:
        raise HTTPException(413, f"line {number}: {len(line)} letters, but a line may have at most {limits.letters}")
    room = translator.description["max_positions"][0] - 1
    if (subwords := len(translator.text.subwords(line.rstrip("\n")).split())) > room:
        raise HTTPException(413, f"line {number}: {subwords} subwords, but the model reads at most {room}")


async def _answers(lines: list[Line], request: Request) -> list[tuple[list[tuple[str, float]], float, float]]:
    """The answers of all lines, which are taken back when the client goes or this task is cancelled.

    Raises:
        HTTPException: the translator failed.
    """
    answers = asyncio.gather(*(line.answer for line in lines))
    # Else asyncio logs each request whose lines are taken back.
    answers.add_done_callback(lambda done: done.cancelled() or done.exception())
    gone = asyncio.create_task(_gone(request))
    try:
        await asyncio.wait([answers, gone], return_when=asyncio.FIRST_COMPLETED)
        if not answers.done():
            raise HTTPException(*GONE)
        return answers.result()
    except (HTTPException, asyncio.CancelledError):
        raise
    except Exception:
        logger.exception("the translation of %d lines failed", len(lines))
        raise HTTPException(500, "the translation failed; the server's log has the reason") from None
    finally:
        for line in lines:
            line.answer.cancel()
        gone.cancel()


async def _gone(request: Request) -> None:
    """Return when the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def serve(translator: Translator, address: str, limits: Limits | None = None, batch: int = 32) -> None:
    """Answer requests until Ctrl-C or SIGTERM; those that run then are still answered.

    Args:
        translator: the model.
        address: [HOST:]PORT; without HOST this machine alone can connect. Port 0 stands for any free one.
        limits, batch: see ``application``.

    Raises:
        ValueError: the address is none, or its port is in use.
    """
    app = application(translator, limits, batch)
    with _listener(address) as listener:
        host, port = listener.getsockname()[:2]
        print(f"http://{f'[{host}]' if ':' in host else host}:{port} (Ctrl-C ends it)", flush=True)
        # uvicorn ends its requests, then raises the signal again.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with contextlib.suppress(KeyboardInterrupt):
            uvicorn.Server(uvicorn.Config(app, log_level="warning", server_header=False)).run(sockets=[listener])


def _listener(address: str) -> socket.socket:
    """A socket that listens at [HOST:]PORT; HOST of IPv6 stands in brackets."""
    host, _, port = address.rpartition(":")
    if not (port.isascii() and port.isdecimal() and int(port) < 65536):
        raise ValueError(f"--serve {address}: expected [HOST:]PORT, such as 8000 or 0.0.0.0:8000")
    try:
        family, *_, place = socket.getaddrinfo(host.strip("[]") or "127.0.0.1", int(port), type=socket.SOCK_STREAM)[0]
        return socket.create_server(place[:2], family=family, backlog=2048)
    except OSError as error:
        raise ValueError(f"--serve {address}: {error.strerror}; choose another address") from None
