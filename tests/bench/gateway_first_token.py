"""A newcomer's first token: alone, beside clients that read nothing, and while workers flood the gateway."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path

from bench.gateway_load import chat, open_stream
from bench.report import render_table
from stack import start_stack

_NUM_OTHERS = 64
_OTHERS_BEGIN_SECONDS = 1.0
_PAUSE_SECONDS = 0.05
# Steps of 2 ms; and steps that take no time at all.
_WORKERS = {
    "paced": ("--sim-step-seconds", "0.002", "--sim-prefill-token-seconds", "0", "--sim-decode-request-seconds", "0"),
    "flood": ("--sim-slowness", "0"),
}


async def measure_first_tokens(seconds: float, markdown: bool) -> str:
    """The table."""
    lines: list[list[str]] = []
    for name, flags in _WORKERS.items():
        with tempfile.TemporaryDirectory() as folder, ExitStack() as cleanup:
            extra = {"worker": (*flags, "--max-num-requests", "256")}
            stack = start_stack(Path(folder), cleanup, executor="sim", prefill_workers=0, extra=extra)
            port = int(stack.rest.rpartition(":")[2])
            if name == "paced":
                lines.append(_line("alone", await _newcomers(port, seconds)))
                lines.append(_line(f"{_NUM_OTHERS} clients read nothing", await _beside(port, seconds, reads=False)))
                lines.append(_line(f"{_NUM_OTHERS} clients read", await _beside(port, seconds, reads=True)))
            else:
                lines.append(_line("alone, steps take no time", await _newcomers(port, seconds)))
                lines.append(_line(f"{_NUM_OTHERS} clients are flooded", await _beside(port, seconds, reads=True)))
    return render_table(("a newcomer's first token, ms", "p50", "p99", "newcomers"), lines, markdown)


async def _beside(port: int, seconds: float, reads: bool) -> list[float]:
    body = chat(stream=True, max_tokens=1900, ignore_eos=True)

    async def stream_for_ever() -> None:
        while True:
            reader = await open_stream(port, body, reads)
            try:
                await reader.ended.wait()
            finally:
                reader.close()

    others = [asyncio.create_task(stream_for_ever()) for _ in range(_NUM_OTHERS)]
    await asyncio.sleep(_OTHERS_BEGIN_SECONDS)
    try:
        return await _newcomers(port, seconds)
    finally:
        for other in others:
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)


async def _newcomers(port: int, seconds: float) -> list[float]:
    body = chat(stream=True, max_tokens=1)
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    found: list[float] = []
    while loop.time() < until:
        reader = await open_stream(port, body)
        found.append(1000 * await reader.first())
        reader.close()
        await asyncio.sleep(_PAUSE_SECONDS)
    return found


def _line(name: str, found: list[float]) -> list[str]:
    p99 = statistics.quantiles(found, n=100)[98]
    return [name, f"{statistics.median(found):.1f}", f"{p99:.1f}", str(len(found))]
