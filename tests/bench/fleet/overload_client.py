"""An open-loop client that sends requests at given times and records the results."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

_WORDS = ("dog", "river", "girl", "tree", "boat", "king", "bird", "moon", "house", "garden", "light", "stone")
_CLIENT_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Tenant:
    name: str
    weight: float
    key: str


@dataclass(slots=True)
class Seen:
    """One request as seen by its client. Times are in seconds of the monotonic clock."""

    tenant: str
    sent: float
    status: int = 0
    retry_after: bool = False
    head: float = 0.0  # arrival of the status
    tokens: list[float] = field(default_factory=list)  # arrival of each event with text
    ended: float = 0.0  # 0: the answer is incomplete

    @property
    def first(self) -> float:
        """Seconds to the first token."""
        return self.tokens[0] - self.sent

    @property
    def between(self) -> float:
        """Mean seconds between two tokens."""
        return (self.tokens[-1] - self.tokens[0]) / max(1, len(self.tokens) - 1)

    def is_good(self, ttft: float, itl: float) -> bool:
        """Whether the answer is complete and within both objectives."""
        return self.status == 200 and self.ended > 0 and self.first <= ttft and self.between <= itl


class _Stream(asyncio.Protocol):
    def __init__(self, seen: Seen) -> None:
        self._seen = seen
        self._head = b""
        self.done = asyncio.Event()
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        seen = self._seen
        if not seen.status:
            self._head += data
            head, found, data = self._head.partition(b"\r\n\r\n")
            if not found:
                return
            seen.status = int(head[9:12])
            seen.head = now
            seen.retry_after = b"\r\nretry-after:" in head.lower()
        if seen.status == 200:
            seen.tokens += [now] * data.count(b'"text":"')
            if b"data: [DONE]" in data:
                seen.ended = now
                self.done.set()
        else:
            self.done.set()

    def connection_lost(self, error: Exception | None) -> None:
        self.done.set()


def _body(rng: random.Random, num_tokens: int) -> bytes:
    prompt = " ".join(rng.choices(_WORDS, k=40))
    fields = {"prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "stream": True, "temperature": 0}
    return json.dumps(fields).encode()


async def _ask(port: int, tenant: Tenant, body: bytes, seen: Seen) -> None:
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(_CLIENT_SECONDS):
            _, stream = await loop.create_connection(lambda: _Stream(seen), "127.0.0.1", port)
            head = (
                f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {tenant.key}\r\n"
                f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
            )
            seen.sent = time.monotonic()
            assert stream.transport is not None
            stream.transport.write(head.encode() + body)
            await stream.done.wait()
            stream.transport.close()
    except (OSError, TimeoutError):
        seen.ended = 0.0


async def offer(
    port: int, tenants: Sequence[Tenant], rate: float, seconds: float, num_tokens: tuple[int, int], rng: random.Random
) -> list[Seen]:
    """Sends requests with Poisson arrivals and uniformly drawn tenants and lengths. Returns after the last answer."""
    seen: list[Seen] = []
    due = time.monotonic()
    end = due + seconds
    async with asyncio.TaskGroup() as asking:
        while (due := due + rng.expovariate(rate)) < end:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            tenant = rng.choice(tenants)
            one = Seen(tenant.name, time.monotonic())
            seen.append(one)
            asking.create_task(_ask(port, tenant, _body(rng, rng.randint(*num_tokens)), one))
    return seen
