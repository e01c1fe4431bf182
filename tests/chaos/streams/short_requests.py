"""A client that asks for a few tokens as often as it can: connections kept alive, answers compared by their bytes."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections import Counter
from collections.abc import Sequence

NUM_PROMPTS = 2000  # different ones
_PROMPT_TOKENS = (18, 60)
_MAX_TOKENS = 4
_PREFIX_TOKENS = 32  # that prompts of one family share
_FAMILIES = 50
_VOCABULARY = (300, 3000)
_LEAVES = 0.01  # of the clients, before their answer
_ANSWER_SECONDS = 60.0
_PAUSE_SECONDS = 0.1
_BUSY = (429, 503)


def bodies(model: str) -> list[bytes]:
    """The requests' bodies: token ids in, greedy, the same each time."""
    rng = random.Random(0)
    families = [[rng.randrange(*_VOCABULARY) for _ in range(_PREFIX_TOKENS)] for _ in range(_FAMILIES)]
    made = []
    for number in range(NUM_PROMPTS):
        own = [rng.randrange(*_VOCABULARY) for _ in range(rng.randrange(*_PROMPT_TOKENS))]
        prompt = families[number % _FAMILIES] + own
        fields = {"model": model, "prompt": prompt, "max_tokens": 1 + number % _MAX_TOKENS, "temperature": 0.0}
        made.append(json.dumps({**fields, "ignore_eos": True}).encode())
    return made


class ShortRequests:
    """So many clients, until so many answers came or `stop`."""

    def __init__(self, gateways: Sequence[str], api_key: str, model: str, num_requests: int, clients: int) -> None:
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self._gateways = tuple(gateways)
        head = f"content-type: application/json\r\nauthorization: Bearer {api_key}\r\n"
        self._requests = [
            f"POST /v1/completions HTTP/1.1\r\nhost: soak\r\n{head}content-length: {len(body)}\r\n\r\n".encode() + body
            for body in bodies(model)
        ]
        self._known: dict[int, bytes] = {}
        self._numbers = itertools.count()
        self._num_requests = num_requests
        self._rng = random.Random(1)
        self._tasks = [asyncio.create_task(self._run(number)) for number in range(clients)]

    @property
    def num_done(self) -> int:
        """Returns the number of answers, of any status, and of clients that left."""
        return self.counts.total() - self.counts["asked again"]

    async def wait(self) -> None:
        """Returns when every request is answered."""
        await asyncio.gather(*self._tasks)

    def close(self) -> None:
        """Ends the clients."""
        for task in self._tasks:
            task.cancel()

    async def _run(self, client: int) -> None:
        connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        turn = client
        while (number := next(self._numbers)) < self._num_requests:
            at = number % NUM_PROMPTS
            leaves = self._rng.random() < _LEAVES
            while True:
                try:
                    if connection is None:
                        host, _, port = self._gateways[turn % len(self._gateways)].rpartition(":")
                        connection = await asyncio.open_connection(host, int(port))
                    connection[1].write(self._requests[at])
                    if leaves:
                        await asyncio.sleep(self._rng.random() * 0.01)
                        self.counts["left"] += 1
                        connection[1].transport.abort()
                        connection = None
                        break
                    async with asyncio.timeout(_ANSWER_SECONDS):
                        status, closes, answer = await _answer(connection[0])
                    if closes:
                        connection[1].transport.abort()
                        connection = None
                except (OSError, EOFError):
                    # The gateway is gone: as a load balancer would, another one is asked.
                    self.counts["asked again"] += 1
                    if connection is not None:
                        connection[1].transport.abort()
                    connection, turn = None, turn + 1
                    await asyncio.sleep(_PAUSE_SECONDS)
                    continue
                if status in _BUSY:
                    self.counts["asked again"] += 1
                    await asyncio.sleep(_PAUSE_SECONDS)
                    turn += 1
                    if connection is not None:
                        connection[1].transport.abort()
                        connection = None
                    continue
                self._judge(at, status, answer)
                break

    def _judge(self, number: int, status: int, answer: bytes) -> None:
        if status != 200:
            self.counts["failed"] += 1
            self.problems.append(f"prompt {number}: HTTP {status} {answer[:300]!r}")
            return
        said = answer[answer.index(b'"choices"') : answer.index(b'"usage"')]
        if self._known.setdefault(number, said) == said:
            self.counts["right"] += 1
        else:
            self.counts["wrong"] += 1
            self.problems.append(f"prompt {number}: {said[:200]!r} instead of {self._known[number][:200]!r}")


async def _answer(reader: asyncio.StreamReader) -> tuple[int, bool, bytes]:
    """Status, whether the connection ends, and the body."""
    head = await reader.readuntil(b"\r\n\r\n")
    lowered = head.lower()
    start = lowered.index(b"content-length:") + 15
    length = int(lowered[start : lowered.index(b"\r\n", start)])
    return int(head[9:12]), b"connection: close" in lowered, await reader.readexactly(length)
