"""Measures a new client's TTFT: alone, with clients that read nothing or send long prompts, and under load.

The other clients run in a separate process, so that they do not delay the new client themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path

import uvloop

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.gateway.load import PATH, chat, open_stream
from support.processes.stack import start_stack

from baton.services.bench.datasets.source import BenchFailed
from baton.services.bench.report import render_table
from baton.services.bench.serve.http_stream import HttpPool

_NUM_OTHERS = 64
_OTHERS_BEGIN_SECONDS = 2.0
_PAUSE_SECONDS = 0.05
_ANSWER_SECONDS = 120.0
_LONG_WORDS = 10_000  # encoded and then rejected, before any worker: the model's limit is 2,048 tokens
_MIDDLE = "Once upon a time there was a dog. " * 60  # long enough to be encoded on another thread
# Steps of 2 ms, and steps that take no time.
_WORKERS = {
    "paced": ("--sim-step-seconds", "0.002", "--sim-prefill-token-seconds", "0", "--sim-decode-request-seconds", "0"),
    "flood": ("--sim-slowness", "0"),
}


async def measure_first_tokens(seconds: float, markdown: bool) -> str:
    """Measures, and returns the table."""
    lines: list[list[str]] = []
    for name, flags in _WORKERS.items():
        with tempfile.TemporaryDirectory() as folder, ExitStack() as cleanup:
            extra = {"worker": (*flags, "--max-num-requests", "256")}
            stack = start_stack(Path(folder), cleanup, executor="sim", prefill_workers=0, extra=extra)
            port = int(stack.rest.rpartition(":")[2])
            if name == "flood":
                lines.append(_line("alone, steps take no time", await _newcomers(port, seconds)))
                lines.append(_line(f"{_NUM_OTHERS} clients are flooded", await _beside(port, seconds, "read")))
                continue
            lines.append(_line("alone", await _newcomers(port, seconds)))
            lines.append(_line("alone, 2,040 characters", await _newcomers(port, seconds, _MIDDLE)))
            lines.append(_line(f"{_NUM_OTHERS} clients read nothing", await _beside(port, seconds, "read nothing")))
            lines.append(_line(f"{_NUM_OTHERS} clients read", await _beside(port, seconds, "read")))
            found = await _beside(port, seconds, "send long prompts", _MIDDLE)
            lines.append(_line(f"2,040 characters; {_NUM_OTHERS} clients send {_LONG_WORDS:,} words each", found))
    return render_table(("a newcomer's first token, ms", "p50", "p99", "newcomers"), lines, markdown)


async def _beside(port: int, seconds: float, what: str, text: str = "") -> list[float]:
    async with _others(port, what):
        return await _newcomers(port, seconds, text)


async def _newcomers(port: int, seconds: float, text: str = "") -> list[float]:
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    found: list[float] = []
    while loop.time() < until:
        said = {"messages": [{"role": "user", "content": f"{len(found)} {text}"}]} if text else {}
        reader = await open_stream(port, chat(stream=True, max_tokens=1, **said))
        found.append(1000 * await reader.first())
        reader.close()
        await asyncio.sleep(_PAUSE_SECONDS)
    return found


@contextlib.asynccontextmanager
async def _others(port: int, what: str) -> AsyncIterator[None]:
    child = await asyncio.create_subprocess_exec(sys.executable, __file__, str(port), what)
    try:
        await asyncio.sleep(_OTHERS_BEGIN_SECONDS)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()


async def _stream_for_ever(port: int, reads: bool) -> None:
    body = chat(stream=True, max_tokens=1900, ignore_eos=True)
    while True:
        reader = await open_stream(port, body, reads)
        await reader.ended.wait()
        reader.close()


async def _ask_for_ever(port: int, numbers: Iterator[int]) -> None:
    pool = HttpPool(f"http://127.0.0.1:{port}", {})
    while True:
        # All begin differently, so that each is encoded as a whole.
        text = f"{next(numbers)} " + "dog tree ball " * (_LONG_WORDS // 3)
        body = chat(max_tokens=1, messages=[{"role": "user", "content": text}])
        status, answer = await pool.fetch("POST", PATH, body, _ANSWER_SECONDS)
        if status != 400:
            raise BenchFailed(f"a chat of {_LONG_WORDS:,} words was answered with {status}: {answer[:200]!r}")


async def _be_the_others(port: int, what: str) -> None:
    numbers = itertools.count()
    if what == "send long prompts":
        others = [_ask_for_ever(port, numbers) for _ in range(_NUM_OTHERS)]
    else:
        others = [_stream_for_ever(port, what != "read nothing") for _ in range(_NUM_OTHERS)]
    await asyncio.gather(*others)


def _line(name: str, found: list[float]) -> list[str]:
    p99 = statistics.quantiles(found, n=100)[98] if len(found) > 1 else found[0]
    return [name, f"{statistics.median(found):.1f}", f"{p99:.1f}", str(len(found))]


if __name__ == "__main__":
    uvloop.run(_be_the_others(int(sys.argv[1]), sys.argv[2]))
