"""Many clients of one server: `PYTHONPATH=tests .venv/bin/python -m helpers.load ADDRESS REQUESTS CLIENTS < text`."""

import itertools
import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx


def load(address, lines, clients):
    """Send a request for each line, each client one after the other: the answers by line's number, and the numbers."""
    numbers, lock, answers, seconds = iter(range(len(lines))), threading.Lock(), {}, []

    def one_client():
        with httpx.Client(base_url=address, timeout=60) as client:
            while True:
                with lock:
                    number = next(numbers, None)
                if number is None:
                    return
                begin = time.perf_counter()
                answer = client.post("/translate", json={"lines": [lines[number]]}).raise_for_status()
                seconds.append(time.perf_counter() - begin)
                (answers[number],) = answer.json()["translations"]

    begin = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        for done in [pool.submit(one_client) for _ in range(clients)]:
            done.result()
    took = time.perf_counter() - begin
    half, most = (statistics.quantiles(seconds, n=100)[place] * 1000 for place in (49, 98))
    measured = f"{len(lines) / took:.0f} requests a second; 50th percentile {half:.0f} ms, 99th {most:.0f} ms"
    return answers, measured


if __name__ == "__main__":
    address, requests, clients = sys.argv[1:]
    text = itertools.islice(itertools.cycle(sys.stdin.read().splitlines()), int(requests))
    print(load(address, list(text), int(clients))[1])
