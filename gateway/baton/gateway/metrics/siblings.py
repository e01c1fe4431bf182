"""The metrics of all processes of one gateway, which share its addresses: whichever is scraped answers for all.

Each process answers at a Unix socket in one folder with its own metrics.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path

_log = logging.getLogger(__name__)

_ANSWER_SECONDS = 2.0
# Of these, the least value of any process is that of the gateway.
_LEAST = frozenset(
    ("baton_tls_certificate_expires_seconds", "baton_gateway_limits_redis_up", "baton_gateway_batches_open")
)


class Siblings:
    """The processes whose sockets are in a folder. `exposition` returns this process's own metrics."""

    def __init__(self, folder: str, exposition: Callable[[], bytes]) -> None:
        self._folder = Path(folder)
        self._own = self._folder / f"{os.getpid()}.sock"
        self._exposition = exposition

    @contextlib.asynccontextmanager
    async def answering(self) -> AsyncIterator[None]:
        """Answers the other processes."""
        server = await asyncio.start_unix_server(self._answer, self._own)
        try:
            yield
        finally:
            server.close()
            self._own.unlink(missing_ok=True)

    async def exposition(self) -> bytes:
        """Returns the metrics of all processes. Those that do not answer are left out, and logged."""
        others = [path for path in sorted(self._folder.glob("*.sock")) if path != self._own]
        answers = await asyncio.gather(*map(_read, others))
        return merged([self._exposition(), *(one for one in answers if one is not None)])

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(self._exposition())
        with contextlib.suppress(OSError):
            await writer.drain()
        writer.close()


async def _read(path: Path) -> bytes | None:
    try:
        async with asyncio.timeout(_ANSWER_SECONDS):
            reader, writer = await asyncio.open_unix_connection(path)
            try:
                return await reader.read()
            finally:
                writer.close()
    except (OSError, TimeoutError) as error:
        _log.warning("the process of %s did not answer a scrape: %s", path.name, error or type(error).__name__)
        return None


def merged(texts: Iterable[bytes]) -> bytes:
    """Returns expositions as one: samples of one name and labels are added, and each family is written once."""
    families: dict[str, tuple[list[str], dict[str, float]]] = {}  # comments and samples, by the family's name
    for text in texts:
        samples: dict[str, float] = {}
        for line in text.decode().splitlines():
            if line.startswith("# HELP "):
                name = line.split(" ", 3)[2]
                comments, samples = families.setdefault(name, ([], {}))
                if not comments:
                    comments.append(line)
            elif line.startswith("# TYPE "):
                if len(comments) < 2:
                    comments.append(line)
            elif line:
                key, _, value = line.rpartition(" ")
                samples[key] = _together(key, samples.get(key), float(value))
    lines: list[str] = []
    for comments, samples in families.values():
        lines += comments
        lines += [f"{key} {value!r}" for key, value in samples.items()]
    return ("\n".join(lines) + "\n").encode()


def _together(key: str, before: float | None, value: float) -> float:
    if before is None:
        return value
    name = key.partition("{")[0]
    return min(before, value) if name in _LEAST or name.endswith("_created") else before + value
