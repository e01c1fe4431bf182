"""Sends requests at a rate, with a limit of concurrent ones, or both. Knows no protocol."""

from __future__ import annotations

import asyncio
import math
import random
import resource
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TextIO

from baton.services.bench.datasets.source import BenchFailed, Dataset, DatasetPrompt
from baton.services.bench.serve.arrivals import Arrivals
from baton.services.bench.serve.client import Client
from baton.services.bench.serve.stats import Limits, Record, Summary, summarize
from baton.services.process.garbage import frozen_heap

_BAR = 24
_PROGRESS_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Load:
    """One level of load."""

    rate: float  # requests per second; inf: as soon as possible
    concurrency: int | None  # maximum in flight
    num_requests: int | None
    duration: float | None  # seconds during which requests are sent
    arrivals: Arrivals = field(default_factory=Arrivals)

    @property
    def is_timed(self) -> bool:
        """Returns whether requests have times, without those of a trace."""
        return not math.isinf(self.rate) or self.arrivals.ramp is not None

    @property
    def ramp_text(self) -> str:
        """Returns how the rate changes, in words; empty: it does not."""
        arrivals = self.arrivals
        return f"{arrivals.first:g} to {arrivals.last:g}/s" if arrivals.ramp is not None else ""


@dataclass(slots=True)
class _Level:
    """A running level."""

    load: Load
    began: float = 0.0
    records: list[Record] = field(default_factory=list)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    num_done: int = 0
    num_errors: int = 0
    num_tokens: int = 0


async def run_level(
    client: Client, dataset: Dataset, load: Load, limits: Limits, seed: int, percentiles: Sequence[float] = ()
) -> Summary:
    """Sends the load and waits for all answers."""
    level = _Level(load)
    prompts = await _prepared(client, dataset, load)
    with frozen_heap():
        cpu = _cpu_seconds()
        progress = asyncio.create_task(_show_progress(level, sys.stderr)) if sys.stderr.isatty() else None
        try:
            await _send_all(client, level, prompts, random.Random(seed))
        finally:
            for task in level.tasks:
                task.cancel()
            if progress is not None:
                progress.cancel()
                print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    if not level.records:
        raise BenchFailed("the dataset has no requests")
    summary = summarize(level.records, load.rate, load.concurrency, limits, _cpu_seconds() - cpu, percentiles)
    return replace(summary, schedule="as recorded" if dataset.size is not None else load.ramp_text)


async def warm_up(client: Client, dataset: Dataset, count: int) -> str:
    """Sends some requests at once, which are not measured. Returns the first error."""
    records = [Record(time.perf_counter()) for _ in range(count)]
    requests = []
    for _ in records:
        if (prompt := await dataset.make()) is None:
            raise BenchFailed(f"the dataset has fewer than the {count} requests of the warm-up; give --warm-up 0")
        requests.append(client.encode(prompt))
    await asyncio.gather(*(client.send(*pair) for pair in zip(requests, records, strict=True)))
    return next((record.error for record in records if record.error), "")


async def _prepared(client: Client, dataset: Dataset, load: Load) -> AsyncIterator[tuple[DatasetPrompt, Any]]:
    """Returns prompts and their requests. A known number of them is made before the first is sent."""
    if load.num_requests is None:
        return _endless(client, dataset)
    made = []
    for _ in range(load.num_requests):
        prompt = await dataset.make()
        if prompt is None:
            break
        # Keeps only the prompt's sizes, because the encoded request has its content.
        made.append(
            (DatasetPrompt(prompt.num_tokens, prompt.num_output, prompt.seed, at=prompt.at), client.encode(prompt))
        )
    return _given(made)


async def _endless(client: Client, dataset: Dataset) -> AsyncIterator[tuple[DatasetPrompt, Any]]:
    while (prompt := await dataset.make()) is not None:
        yield prompt, client.encode(prompt)


async def _given(made: list[tuple[DatasetPrompt, Any]]) -> AsyncIterator[tuple[DatasetPrompt, Any]]:
    for pair in made:
        yield pair


async def _send_all(
    client: Client, level: _Level, prompts: AsyncIterator[tuple[DatasetPrompt, Any]], source: random.Random
) -> None:
    load = level.load
    slots = asyncio.Semaphore(load.concurrency) if load.concurrency else None
    level.began = time.perf_counter()
    due = level.began
    async for prompt, request in prompts:
        if prompt.at is not None:
            due = level.began + prompt.at
        if slots is not None:
            await slots.acquire()
        if (delay := due - time.perf_counter()) > 0:
            await asyncio.sleep(delay)
        now = time.perf_counter()
        if load.duration is not None and now - level.began > load.duration:
            break
        is_due = load.is_timed or prompt.at is not None
        record = Record(due if is_due else now)
        record.wanted_prompt, record.wanted_output = prompt.num_tokens, prompt.num_output
        level.records.append(record)
        task = asyncio.create_task(_send(client, level, request, record, slots))
        level.tasks.add(task)
        task.add_done_callback(level.tasks.discard)
        due += load.arrivals.gap(load.rate, len(level.records), load.num_requests, source)
    while level.tasks:
        await asyncio.wait(set(level.tasks))


async def _send(client: Client, level: _Level, request: Any, record: Record, slots: asyncio.Semaphore | None) -> None:
    try:
        await client.send(request, record)
    finally:
        level.num_done += 1
        level.num_errors += bool(record.error)
        level.num_tokens += record.num_output or record.num_prompt
        if slots is not None:
            slots.release()


async def _show_progress(level: _Level, out: TextIO) -> None:
    while True:
        await asyncio.sleep(_PROGRESS_SECONDS)
        print(f"\r{progress_line(level, time.perf_counter())}\x1b[K", end="", file=out, flush=True)


def progress_line(level: _Level, now: float) -> str:
    """Returns a progress bar over requests or time, and the state."""
    load, seconds = level.load, max(now - level.began, 1e-9)
    if load.num_requests is not None:
        share, of = level.num_done / load.num_requests, f"{level.num_done}/{load.num_requests}"
    else:
        share, of = seconds / (load.duration or math.inf), f"{level.num_done}"
    filled = round(_BAR * min(share, 1.0))
    return (
        f"[{'#' * filled}{'.' * (_BAR - filled)}] {of} done, {len(level.tasks)} running, {level.num_errors} errors, "
        f"{level.num_tokens / seconds:,.0f} tok/s, {seconds:.0f} s"
    )


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
