"""A neighbour's first tokens, in a process of its own, while clients attack or do not.

python tests/attack/neighbours.py PORT SECONDS RATE SEED < KEY
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from attack.case import CHATS, Case
from attack.client import send

_WORDS = ("dog", "river", "girl", "tree", "boat", "king", "bird", "moon", "house", "garden", "light", "stone")


def _ask(port: int, key: str, prompt: str, found: list[float]) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": prompt}], "stream": True, "max_tokens": 8})
    began = time.monotonic()
    tokens: list[float] = []
    answer = send(port, key, Case(0, "neighbour", CHATS, body.encode()), 60, lambda: tokens.append(time.monotonic()))
    if not (answer.accepted and tokens):
        print(f"no token after {time.monotonic() - began:.1f} s: {answer.status} {answer.text!r}", file=sys.stderr)
    found.append(tokens[0] - began if answer.accepted and tokens else 60.0)


def main() -> None:
    """Prints the seconds to each first token, as a JSON list."""
    port, seconds, rate, seed = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
    key = sys.stdin.readline().strip()
    rng = random.Random(seed)
    found: list[float] = []
    asking = []
    due = time.monotonic()
    end = due + seconds
    while (due := due + rng.expovariate(rate)) < end:
        time.sleep(max(0.0, due - time.monotonic()))
        asking.append(threading.Thread(target=_ask, args=(port, key, " ".join(rng.choices(_WORDS, k=20)), found)))
        asking[-1].start()
    for thread in asking:
        thread.join()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
