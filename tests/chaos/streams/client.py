"""A client of several gateways: tries the next one if one is unreachable, and resumes broken streams."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from chaos.streams.oracle import Seen

_TOTAL_SECONDS = 60.0
_ASK_SECONDS = 15.0  # that a client goes on asking gateways that are not there, or are full
_RETRY_SECONDS = 0.1
_BUSY = (429, 503)


class NotServed(Exception):
    """A gateway refused a request. `status` is the HTTP status."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"HTTP {status}: {body[:300]}")
        self.status = status


class Client:
    """One tenant's. `gateways`: host:port of each, in the order of preference."""

    def __init__(self, gateways: Sequence[str], api_key: str = "", resumes: bool = False) -> None:
        self._gateways = tuple(gateways)
        self._api_key = api_key
        self._resumes = resumes
        self._turn = itertools.count()

    async def chat(self, number: int, body: dict[str, Any]) -> Seen:
        """Runs one streamed chat to its end, over as many gateways as that takes."""
        seen = Seen(number)
        last_id, done = "", False
        asked_at = time.monotonic()
        try:
            async with asyncio.timeout(_TOTAL_SECONDS):
                while not done:
                    try:
                        async for event_id, data in self._events("/v1/chat/completions", body, last_id):
                            done = data == b"[DONE]"
                            if not done:
                                seen.times.append(time.monotonic())
                                seen.take(json.loads(data))
                            last_id = event_id or last_id
                        if not done:
                            raise ConnectionError("the stream ended without [DONE]")
                    except (OSError, EOFError, NotServed) as error:
                        refused = isinstance(error, NotServed) and error.status not in _BUSY
                        lost = bool(seen.times) and not (self._resumes and last_id)
                        late = not seen.times and time.monotonic() > asked_at + _ASK_SECONDS
                        if refused or lost or late:
                            seen.problem = f"{type(error).__name__}: {error}"
                            return seen
                        seen.num_resumes += bool(seen.times)
                        await asyncio.sleep(_RETRY_SECONDS)
        except TimeoutError:
            seen.problem = f"not complete after {_TOTAL_SECONDS:g} s, {len(seen.times)} events"
        return seen

    async def post(self, path: str, body: dict[str, Any]) -> int:
        """Sends a request. Returns the status without reading the answer."""
        try:
            async for _ in self._events(path, body, ""):
                pass
        except NotServed as error:
            return error.status
        except (OSError, EOFError):
            return 0
        return 200

    async def _events(self, path: str, body: dict[str, Any], last_id: str) -> AsyncIterator[tuple[str, bytes]]:
        """Ids and data of a stream's events; of the gateway whose turn it is."""
        host, _, port = self._gateways[next(self._turn) % len(self._gateways)].rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(self._head(path, json.dumps(body).encode(), last_id))
            status = int((await _line(reader)).split()[1])
            while (await _line(reader)).strip():
                pass
            if status != 200:
                raise NotServed(status, (await reader.read(4096)).decode(errors="replace"))
            event_id = ""
            while line := await reader.readline():
                if line.startswith(b"id: "):
                    event_id = line[4:].strip().decode()
                elif line.startswith(b"data: "):
                    yield event_id, line[6:].strip()
        finally:
            writer.transport.abort()

    def _head(self, path: str, body: bytes, last_id: str) -> bytes:
        lines = [f"POST {path} HTTP/1.1", "host: chaos", "connection: close", f"content-length: {len(body)}"]
        lines += ["content-type: application/json", f"x-request-id: {uuid.uuid4().hex}"]
        lines += [f"authorization: Bearer {self._api_key}"] if self._api_key else []
        lines += [f"last-event-id: {last_id}"] if last_id else []
        return "\r\n".join([*lines, "", ""]).encode() + body


async def _line(reader: asyncio.StreamReader) -> bytes:
    line = await reader.readline()
    if not line:
        raise ConnectionError("the gateway ended the connection before its answer")
    return line


class Crowd:
    """So many streams at a time, until it is stopped."""

    def __init__(self, run: Callable[[int], Any], concurrency: int, num_requests: int) -> None:
        self._run_one = run
        self._numbers = (number % num_requests for number in itertools.count())
        self._stopping = False
        self.streams: list[Seen] = []
        self._tasks = [asyncio.create_task(self._run()) for _ in range(concurrency)]

    async def _run(self) -> None:
        while not self._stopping:
            self.streams.append(await self._run_one(next(self._numbers)))

    async def stop(self) -> None:
        """Waits until running requests are complete."""
        self._stopping = True
        await asyncio.gather(*self._tasks)
