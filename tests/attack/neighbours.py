"""A neighbour's first tokens, in a process of its own, while clients attack or do not.

python tests/attack/neighbours.py PORT SECONDS RATE SEED < KEY

Prints them as JSON: when each request began and received its token, in nanoseconds since 1970, and its trace id. One
that received none within 60 seconds counts as these 60 seconds.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from attack.cases.case import CHATS, Case
from attack.client import send

_WORDS = ("dog", "river", "girl", "tree", "boat", "king", "bird", "moon", "house", "garden", "light", "stone")


_WAIT_SECONDS = 60


def _ask(port: int, key: str, prompt: str, trace_id: str, found: list[tuple[int, int, str]]) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": prompt}], "stream": True, "max_tokens": 8})
    case = Case(0, "neighbour", CHATS, body.encode(), headers=(("traceparent", f"00-{trace_id}-{trace_id[:16]}-01"),))
    began = time.time_ns()
    tokens: list[int] = []
    answer = send(port, key, case, _WAIT_SECONDS, lambda: tokens.append(time.time_ns()))
    if not (answer.accepted and tokens):
        seconds = (time.time_ns() - began) / 1e9
        print(f"no token after {seconds:.1f} s: {answer.status} {answer.text!r}", file=sys.stderr)
    found.append((began, tokens[0] if answer.accepted and tokens else began + _WAIT_SECONDS * 10**9, trace_id))


def main() -> None:
    """Prints each request's times and trace id, as a JSON list."""
    port, seconds, rate, seed = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
    key = sys.stdin.readline().strip()
    rng = random.Random(seed)
    found: list[tuple[int, int, str]] = []
    asking = []
    due = time.monotonic()
    end = due + seconds
    while (due := due + rng.expovariate(rate)) < end:
        time.sleep(max(0.0, due - time.monotonic()))
        prompt, trace_id = " ".join(rng.choices(_WORDS, k=20)), f"{random.getrandbits(128) or 1:032x}"
        asking.append(threading.Thread(target=_ask, args=(port, key, prompt, trace_id, found)))
        asking[-1].start()
    for thread in asking:
        thread.join()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
