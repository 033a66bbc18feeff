"""Many clients of one server.

PYTHONPATH=scripts .venv/bin/python -m ea_tools bench.server_load http://127.0.0.1:8000 REQUESTS CLIENTS < text
"""

import argparse
import itertools
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

Translations = list[dict[str, Any]]  # of a line, best first: "text" and "score"


def load(address: str, lines: list[str], clients: int) -> tuple[dict[int, Translations], str]:
    """Send each line as a request, `clients` at a time. Returns the answers by line number, and the timings."""
    seconds: list[float] = []

    def send(line: str) -> Translations:
        begin = time.perf_counter()
        answer = client.post("/translate", json={"lines": [line]}).raise_for_status()
        seconds.append(time.perf_counter() - begin)
        (translations,) = answer.json()["translations"]
        return translations

    begin, limits = time.perf_counter(), httpx.Limits(max_connections=clients, max_keepalive_connections=clients)
    with httpx.Client(base_url=address, timeout=60, limits=limits) as client, ThreadPoolExecutor(clients) as pool:
        answers = dict(enumerate(pool.map(send, lines)))
    took = time.perf_counter() - begin
    percentiles = [1000 * cut for cut in statistics.quantiles(seconds, n=100)]
    timings = f"50th percentile {percentiles[49]:.0f} ms, 99th {percentiles[98]:.0f} ms"
    return answers, f"{len(lines) / took:.0f} requests a second; {timings}"


def main() -> None:
    """Read lines from standard input, send them, and print the timings."""
    parser = argparse.ArgumentParser(prog="server_load", description="Measure a server of `ea_runtime --serve`.")
    parser.add_argument("address", help="of the server, e.g. http://127.0.0.1:8000")
    parser.add_argument("requests", type=int, help="how many, one line each; the input is repeated where it is short")
    parser.add_argument("clients", type=int, help="how many at once, each with one request at a time")
    args = parser.parse_args()
    text = sys.stdin.read().splitlines()
    if not text or args.requests < 2 or args.clients < 1:
        parser.error("expected lines on standard input, 2 requests or more, and 1 client or more")
    lines = itertools.islice(itertools.cycle(text), args.requests)
    try:
        print(load(args.address, list(lines), args.clients)[1])
    except httpx.HTTPError as error:
        sys.exit(f"server_load: {args.address}: {error}")
