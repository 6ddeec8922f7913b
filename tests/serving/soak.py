"""Many requests of ragged lengths with random arrivals, cancellations and idle times: every answer right, no hang, no growth.

    python -m tests.serving.soak ADDRESS MODEL --requests 10000 --server PID

Exits 1 with what was wrong. PID is the process whose descendants' memory is watched: that of `inc serve`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.serving.client import complete
from tests.serving.models import prompts

NUM_PROMPTS = 40
LENGTHS = (1, 4, 16, 40)
CANCELLED_TOKENS = 200
REPORT_EVERY = 500
ALLOWED_GROWTH = 1.1
"""Memory at the end over memory after a quarter of the requests: caches fill, a leak of a step would show as more."""


def memory_kib(root: int) -> int:
    """Resident memory of a process and its descendants, without what they share."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(int(path.parent.name))
    total, todo = 0, [root]
    while todo:
        pid = todo.pop()
        todo += children.get(pid, [])
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))
    return total


def cancel(address: str, model: str, prompt: str) -> None:
    """Begin a long answer and hang up after its first piece."""
    body = {"model": model, "prompt": prompt, "max_tokens": CANCELLED_TOKENS, "ignore_eos": True, "stream": True}
    request = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        answer.readline()


class Soak:
    """One run; `wrong` collects what was not as it should be."""

    def __init__(self, address: str, model: str, seed: int) -> None:
        self.address, self.model = address, model
        self.random = random.Random(seed)
        self.texts = prompts(NUM_PROMPTS, seed=3)
        self.expected = [complete(address, model, text, max_tokens=max(LENGTHS))["tokens"] for text in self.texts]
        self.wrong: list[str] = []
        self.done = self.cancelled = 0
        self.lock = threading.Lock()

    def one(self, number: int, cancels: bool, length: int) -> None:
        """One request; greedy answers begin alike whatever their length."""
        which = number % NUM_PROMPTS
        try:
            if cancels:
                cancel(self.address, self.model, self.texts[which])
            else:
                tokens = complete(self.address, self.model, self.texts[which], max_tokens=length)["tokens"]
                if tokens != self.expected[which][:length]:
                    self.wrong.append(f"request {number}: {tokens} instead of {self.expected[which][:length]}")
        except OSError as error:
            self.wrong.append(f"request {number}: {error}")
        with self.lock:
            self.done += 1
            self.cancelled += cancels

    def report(self, start: float, server: int | None) -> int:
        """Print how far it is. Returns the memory, in KiB."""
        memory, seconds = memory_kib(server) if server else 0, time.monotonic() - start
        print(
            f"{self.done} requests, {self.cancelled} of them cancelled, in {seconds:.0f} s; {len(self.wrong)} wrong; "
            f"memory {memory / 1024:.0f} MiB",
            flush=True,
        )
        return memory

    def run(self, num_requests: int, server: int | None) -> list[str]:
        """Send everything. Returns what was wrong."""
        start, middle = time.monotonic(), 0
        with ThreadPoolExecutor(24) as pool:
            waiting = []
            for number in range(num_requests):
                if self.random.random() < 0.02:  # let every rank run dry
                    for future in waiting:
                        future.result()
                    waiting.clear()
                    time.sleep(self.random.random())
                time.sleep(self.random.expovariate(200.0))
                waiting.append(
                    pool.submit(self.one, number, self.random.random() < 0.1, self.random.choice(LENGTHS))
                )
                if server and number == num_requests // 4:
                    middle = memory_kib(server)
                if number % REPORT_EVERY == REPORT_EVERY - 1:
                    self.report(start, server)
        end = self.report(start, server)
        if middle and end > ALLOWED_GROWTH * middle:
            self.wrong.append(f"memory grew from {middle} to {end} KiB")
        return self.wrong


def main() -> int:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("address")
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--server", type=int, help="process id of inc serve")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    wrong = Soak(options.address, options.model, options.seed).run(options.requests, options.server)
    for line in wrong[:10]:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
