"""Audits a fleet after the last stream: nothing is held, nothing is counted, and the index is accurate."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import cast

import redis
from chaos.fleet.fleet import Fleet, processes_of
from support.processes.stack import metric

_IDLE_SECONDS = 10.0
# Placements that nobody reports on are forgotten by routers after two minutes.
_FORGET_SECONDS = 130.0
_POLL_SECONDS = 0.25
_REDIS_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Audit:
    """What is wrong. Empty and 0: nothing."""

    problems: tuple[str, ...]
    num_leaked_blocks: int


def audit(fleet: Fleet, reports_lost: bool) -> Audit:
    """Waits for what ends by itself, then looks. `reports_lost`: gateways or routers died with reports that
    they alone had, and routers forget those placements by themselves."""
    until = time.monotonic() + _IDLE_SECONDS
    patient_until = time.monotonic() + (_FORGET_SECONDS if reports_lost else _IDLE_SECONDS)
    while True:
        soon, late = [*_pools(fleet), *_index(fleet), *_gateways(fleet)], _routers(fleet)
        now = time.monotonic()
        if (not soon and not late) or (soon and now > until) or now > patient_until:
            return Audit((*soon, *late), num_held_blocks(fleet))
        time.sleep(_POLL_SECONDS)


def num_held_blocks(fleet: Fleet) -> int:
    """Blocks that requests hold or transfers lease, in all pools."""
    held = [fleet.stats(worker) for worker in fleet.workers]
    return sum(stats.num_held_blocks + stats.num_leased_blocks for stats in held)


Memory = dict[str, tuple[tuple[int, ...], int]]  # by service: its processes and bytes


def memory_of(fleet: Fleet, most: bool) -> Memory:
    """Returns the memory of the services' processes and of Redis. `most` is Redis' maximum so far.

    Redis's process has 7 MB before it holds anything, and keeps what it once had. What it holds goes up and down by a
    MB or two; keys that nobody deletes would take it beyond all that it ever held.
    """
    found = {}
    for service in fleet.services:
        processes = processes_of(service)
        pids = tuple(sorted(process.pid for process in processes))
        found[service.plan.name] = pids, sum(process.memory_info().rss for process in processes)
    if fleet.redis.process is not None:
        told = _redis_memory(fleet.redis.port)
        found["redis"] = (fleet.redis.process.pid,), told["used_memory_peak" if most else "used_memory"]
    return found


def _redis_memory(port: int) -> dict[str, int]:
    """A stopped one is asked until it goes on."""
    until = time.monotonic() + _REDIS_SECONDS
    with redis.Redis(port=port, socket_timeout=1.0) as client:
        while True:
            try:
                return cast(dict[str, int], client.info("memory"))
            except redis.RedisError:
                if time.monotonic() > until:
                    raise
                time.sleep(_POLL_SECONDS)


def _pools(fleet: Fleet) -> list[str]:
    problems = []
    for worker in fleet.workers:
        stats = fleet.stats(worker)
        total = stats.num_held_blocks + stats.num_leased_blocks + stats.num_cached_blocks + stats.num_empty_blocks
        if stats.num_held_blocks or stats.num_leased_blocks or total != stats.state.load.num_blocks:
            problems.append(
                f"{worker.plan.name}: {stats.num_held_blocks} blocks held, {stats.num_leased_blocks} leased, "
                f"{total} of {stats.state.load.num_blocks} known"
            )
    return problems


def _index(fleet: Fleet) -> list[str]:
    problems = []
    stats = {worker.plan.name: fleet.stats(worker) for worker in fleet.workers}
    stored = metric(fleet.metrics(fleet.kvstore), "baton_kvstore_blocks")
    total = sum(each.num_cached_blocks for each in stats.values())
    if stored != total:
        problems.append(f"the workers cache {total} blocks, the kvstore knows {stored:.0f}")
    cached = {name: each.num_indexed_blocks for name, each in stats.items()}
    for router in fleet.routers:
        entries = fleet.entries(router)
        for name, count in cached.items():
            known = entries[name].num_indexed_blocks if name in entries else -1
            if known != count:
                problems.append(f"{name} caches {count} blocks, {router.plan.name} knows {known}")
    return problems


def _gateways(fleet: Fleet) -> list[str]:
    problems = []
    for gateway in fleet.gateways:
        text = fleet.metrics(gateway)
        running = metric(text, "baton_gateway_in_flight")
        errors = metric(text, "baton_gateway_protocol_errors_total")
        if running or errors:
            problems.append(f"{gateway.plan.name}: {running:.0f} requests in flight, {errors:.0f} protocol errors")
    return problems


def _routers(fleet: Fleet) -> list[str]:
    problems = []
    for router in fleet.routers:
        waiting = metric(fleet.metrics(router), "baton_router_in_flight")
        if waiting:
            problems.append(f"{router.plan.name}: {waiting:.0f} placements not reported on")
    return problems
