"""Streams at a given load while a plan of faults is carried out, each compared with the undisturbed run."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from chaos.fleet.actors import hurt
from chaos.fleet.faults import Fault, Planned
from chaos.fleet.fleet import Fleet
from chaos.streams import asked
from chaos.streams.client import Client, Crowd
from chaos.streams.oracle import Seen, difference, gaps_of, percentile
from support.processes.stack import MODEL_NAME, metric

T = TypeVar("T")

_WARM_SECONDS = 2.0
_AT_ONCE = 6  # undisturbed requests
_LONG_REQUESTS = 60  # that fill the pools
_ALLOWED = (200, 429, 503)
_COUNTED = ("failovers", "lost_worker_streams", "silent_workers", "poisonous_requests")


@dataclass
class Disturbed:
    """What came of one run."""

    num_streams: int = 0
    num_good: int = 0
    num_resumes: int = 0
    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)  # streams by kind
    wrong: list[str] = field(default_factory=list)  # what was wrong with each other stream
    gaps: dict[str, list[float]] = field(default_factory=dict)  # of streams that ran at a fault, by its kind
    hit_gaps: list[float] = field(default_factory=list)  # of as many, for each fault, as the victim had
    counted: dict[str, float] = field(default_factory=dict)

    @property
    def hit_p99(self) -> float:
        """Seconds; of the streams that the faults hit."""
        return percentile(self.hit_gaps, 0.99)


async def learn(client: Client, max_tokens: int) -> dict[int, Seen]:
    """Every request's undisturbed answer. Raises AssertionError where one has none."""
    answers: dict[int, Seen] = {}
    for first in range(0, asked.NUM_REQUESTS, _AT_ONCE):
        numbers = range(first, min(first + _AT_ONCE, asked.NUM_REQUESTS))
        for seen in await asyncio.gather(*(_ask(client, number, max_tokens) for number in numbers)):
            assert not seen.problem, f"undisturbed request {seen.number}: {seen.problem}"
            answers[seen.number] = seen
    return answers


async def _ask(client: Client, number: int, max_tokens: int) -> Seen:
    return await client.chat(number, asked.body_of(number, MODEL_NAME, max_tokens))


async def disturb(
    fleet: Fleet, client: Client, plan: Sequence[Planned], load: float, max_tokens: int, told: bool = False
) -> Disturbed:
    """Runs the plan. `load` is the used part of the decode workers' rows; `told` prints each fault."""
    undisturbed = await learn(client, max_tokens)
    concurrency = max(2, round(load * fleet.shape.places * fleet.shape.decode / asked.MEAN_CHOICES))
    crowd = Crowd(lambda number: _ask(client, number, max_tokens), concurrency, asked.NUM_REQUESTS)
    result = Disturbed()
    began = time.monotonic()
    await asyncio.sleep(_WARM_SECONDS)
    at: list[tuple[Fault, float]] = []
    refused: Counter[int] = Counter()
    for number, planned in enumerate(plan, 1):
        await asyncio.sleep(planned.pause_seconds)
        at.append((planned.fault, time.monotonic()))
        if told:
            print(f"{number} of {len(plan)}: {planned.fault.value} {planned.target}", flush=True)
        if planned.fault is Fault.POOLS_FULL:
            refused += await _fill_pools(client, number)
            continue
        mend = await in_thread(fleet, partial(hurt, fleet, planned))
        await asyncio.sleep(planned.lasting_seconds)
        await in_thread(fleet, mend)
    await crowd.stop()
    result.seconds = time.monotonic() - began
    strange = {status: count for status, count in refused.items() if status not in _ALLOWED}
    if strange:
        result.wrong.append(f"long requests were answered {strange}; only {_ALLOWED} are right")
    _judge(result, crowd.streams, undisturbed)
    _measure(result, crowd.streams, at, fleet.shape.decode)
    for name in _COUNTED:
        full = f"baton_gateway_{name}_total"
        result.counted[name] = sum(metric(fleet.metrics(one), full) for one in fleet.gateways)
    return result


async def in_thread(fleet: Fleet, call: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(fleet.threads, call)


async def _fill_pools(client: Client, seed: int) -> Counter[int]:
    """Far more long requests at once than the pools hold. Their statuses."""
    rng = random.Random(seed)
    numbers = [rng.randrange(1 << 20) for _ in range(_LONG_REQUESTS)]
    bodies = [asked.long_body(number, MODEL_NAME, 40) for number in numbers]
    return Counter(await asyncio.gather(*(client.post("/v1/completions", body) for body in bodies)))


def _judge(result: Disturbed, streams: Sequence[Seen], undisturbed: dict[int, Seen]) -> None:
    result.num_streams = len(streams)
    result.num_resumes = sum(seen.num_resumes for seen in streams)
    for seen in streams:
        kind = asked.kind_of(seen.number)
        result.kinds[kind] += 1
        problem = difference(seen, undisturbed[seen.number])
        result.num_good += not problem
        if problem:
            result.wrong.append(f"{kind}, request {seen.number}: {problem}")


def _measure(result: Disturbed, streams: Sequence[Seen], at: list[tuple[Fault, float]], num_decodes: int) -> None:
    for fault, fault_at in at:
        result.faults[fault.value] += 1
        gaps = gaps_of(streams, fault_at)
        result.gaps.setdefault(fault.value, []).extend(gaps)
        result.hit_gaps += gaps[: max(1, len(gaps) // num_decodes)]
