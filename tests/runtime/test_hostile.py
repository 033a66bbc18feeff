"""The server holds under hostile clients: each attack is bounded, and a well-behaved client is answered meanwhile.

All clients are on this machine. The server has the model in the box.
"""

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers import REPO
from helpers.toy import ENVIRONMENT

pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx")

from ea_runtime.text import SHORT, Text  # noqa: E402

pytestmark = pytest.mark.slow

FOLDER = REPO / "pretrained/multi30k-de-en"
#: a server of which the system holds few bytes that a client does not read
CODE = """
import socket, sys
from ea_runtime import Translator
from ea_runtime.serve import Limits, serve
create = socket.create_server
def small(*place, **options):
    listener = create(*place, **options)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return listener
socket.create_server = small
serve(Translator(sys.argv[1], threads=1), "0", Limits(**eval(sys.argv[2])))
"""
#: seconds within which a well-behaved client is answered
SOON = 2


def crowd():
    """How many times as long things take where other programs use the processors, too."""
    return max(1, os.getloadavg()[0] / os.cpu_count())


@contextlib.contextmanager
def serving(files=1024, **limits):
    """A server's process that may open so many files, and where it listens."""
    line = f'ulimit -Sn {files}; exec "$0" -c "$@"'
    words = ["bash", "-c", line, sys.executable, CODE, FOLDER, repr(limits)]
    options = {"cwd": REPO, "env": ENVIRONMENT, "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(words, **options) as server:
        try:
            url = httpx.URL(server.stdout.readline().split()[0])
            yield server, (url.host, url.port)
        finally:
            server.kill()


@pytest.fixture(scope="module")
def address():
    """A server with the limits that it has by default."""
    with serving() as (_, address):
        yield address


def assert_answers_soon(address):
    began = time.monotonic()
    with httpx.Client(base_url="http://{}:{}".format(*address), timeout=30) as client:
        assert client.get("/health").json()["status"] == "ok"
        answer = client.post("/translate", json={"lines": ["Ein Hund rennt über die Wiese."]})
    assert answer.json()["translations"][0][0]["text"] == "a dog runs through the grass."
    assert time.monotonic() - began < SOON * crowd()


def assert_ends(server, within):
    """In order, within these seconds, and without a word."""
    server.send_signal(signal.SIGTERM)
    assert (server.wait(within * crowd()), server.stderr.read()) == (0, "")


@contextlib.contextmanager
def connections(address, count, head):
    """Connections that have sent some bytes."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_connection(address, timeout=10)) for _ in range(count)]
        for one in sockets:
            with contextlib.suppress(ConnectionError):
                one.sendall(head)
        yield sockets


def is_closed(connection):
    """Whether the server has nothing to say, and closes it within 2 seconds, on a busy machine more."""
    connection.settimeout(2 * crowd())
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True
    except TimeoutError:
        return False


@contextlib.contextmanager
def attacking(address, body, count):
    """This request under way `count` times; the futures of its answers."""
    url = "http://{}:{}/translate".format(*address)
    with ThreadPoolExecutor(count) as pool:
        yield [pool.submit(httpx.post, url, json=body, timeout=30) for _ in range(count)]


def test_the_page_shows_the_servers_answer(address):
    page = (REPO / "docs/production.md").read_text(encoding="utf-8")
    request, expected = (
        json.loads(re.search(f"{place}(.*)", page)[1].split("'")[0]) for place in ("--json '", "```json\n")
    )
    answer = httpx.post("http://{}:{}/translate".format(*address), json=request).json()
    found = [[{**one, "score": round(one["score"], 2)} for one in best] for best in answer["translations"]]
    assert {**answer, "translations": found, "seconds": expected["seconds"]} == expected


def test_headers_that_never_end_hold_no_place():
    """More connections than the process may have files."""
    with serving(files=128) as (server, address):
        head = b"POST /translate HTTP/1.1\r\nHost: x\r\nX: "
        with connections(address, 160, head):
            assert_answers_soon(address)
            assert_ends(server, within=2)


def test_the_connection_that_has_waited_longest_makes_room():
    """One that has a request under way keeps its place."""
    get = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    with serving(connections=2) as (_, address):
        with contextlib.ExitStack() as stack:
            first, second, _ = (stack.enter_context(connections(address, 1, b""))[0] for _ in range(3))
            assert is_closed(first)
            second.sendall(get)
            assert second.recv(1000).startswith(b"HTTP/1.1 200")
        for wait in (0.05, 0.1, 0.2, 0.4, 0.8):  # both requests are under way at one of these times
            with attacking(address, {"lines": ["q" * 55] * 3, "beam": 20}, 2) as answers:
                time.sleep(wait)
                with connections(address, 3, b"") as others:
                    closed = [is_closed(one) for one in others]
                answered = [one.exception() is None and one.result().status_code == 200 for one in answers]
            if all(closed + answered):
                break
        assert all(closed + answered)


def test_a_request_may_take_longer_than_its_headers():
    work = {"lines": ["q" * 55] * 3, "beam": 20}
    with serving(headers=0.3) as (_, address), attacking(address, work, 8) as slow:
        assert [request.result().status_code for request in slow] == [200] * 8
        assert max(sum(request.result().json()["seconds"].values()) for request in slow) > 0.3


@pytest.mark.parametrize("before", [b"", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"], ids=["first", "second"])
def test_headers_have_to_be_complete_in_time(before):
    """Whether or not there is always something new of them."""
    with serving(headers=0.5) as (_, address), connections(address, 1, before) as (slow,):
        began = time.monotonic()
        with pytest.raises(ConnectionError):
            while time.monotonic() - began < 5 * crowd():
                slow.sendall(b"G")
                time.sleep(0.1)
        assert time.monotonic() - began < 2 * crowd()


def test_a_client_that_reads_no_answer_does_not_keep_the_server_from_ending():
    with serving(seconds=1, headers=0.5) as (server, address), socket.socket() as greedy:
        greedy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        greedy.connect(address)
        greedy.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 100)
        assert_answers_soon(address)
        assert_ends(server, within=4)


def long_words(count, letters):
    """Words without spaces between them, which subwords are made of slowly."""
    rng = random.Random(1)
    words = [word.split("@@")[0].split()[0] for word in (FOLDER / "dict.de.txt").read_text().splitlines()]
    return ["".join(rng.choices(words, k=letters))[:letters] for _ in range(count)]


def test_a_request_that_is_refused_costs_no_work(address):
    """Also where only its last line is above a limit."""
    for lines in ([*long_words(24, 500), "a " * 251], [*long_words(99, 1250), "a"]):
        with attacking(address, {"lines": lines}, 8) as refused:
            assert_answers_soon(address)
            assert {one.result().status_code for one in refused} == {413}


def test_checks_take_turns(address):
    """Each request may have one line checked before the next has."""
    words = long_words(49, 499)
    lines = [" ".join(words[begin : begin + 5]) for begin in range(0, len(words), 5)]
    with attacking(address, {"lines": lines}, 8):
        time.sleep(0.3)
        assert_answers_soon(address)


def test_long_words_are_not_remembered(monkeypatch):
    text = Text(FOLDER)
    cache = text._split.__closure__[0].cell_contents.cache
    for word in (*long_words(20, 200), *long_words(1, SHORT + 1), *long_words(20, SHORT)):
        text.subwords(word)
    assert 0 < max(map(len, cache)) <= SHORT


def test_a_small_request_of_much_work_is_refused(address):
    with attacking(address, {"lines": [("q" * 500 + " ") * 2], "beam": 20}, 1) as (refused,):
        assert_answers_soon(address)
        assert refused.result().status_code == 413


def test_requests_of_as_much_work_as_allowed_let_others_pass(address):
    with attacking(address, {"lines": ["q" * 55], "beam": 20}, 4) as answers:
        time.sleep(0.3)
        assert_answers_soon(address)
        assert {one.result().status_code for one in answers} == {200}
