"""Examines all topics: observes, then checks. An observation that fails or times out is a finding."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from baton.services import extras
from baton.services.doctor.finding import Finding, unknown
from baton.services.doctor.machine import clocks, fabric, gpus, limits, versions
from baton.services.doctor.service import api_keys, certificates, kubernetes, listening, model, peers, redis_server
from baton.services.doctor.targets import Targets
from baton.services.machine.gpus import Gpu, GpuFacts, observe_gpus

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class _Topic:
    name: str
    look: Callable[[], Awaitable[Iterable[Finding]]]


async def examine(targets: Targets, seconds: float) -> list[Finding]:
    """Returns all findings, by topic. `seconds` is the timeout of one check; programs get a few times that."""
    topics = _topics(targets, seconds)
    found = await asyncio.gather(*(_guarded(topic, 8 * seconds) for topic in topics))
    return [finding for part in found for finding in part]


def _topics(targets: Targets, seconds: float) -> list[_Topic]:
    device = asyncio.ensure_future(_device(targets, seconds))
    return [*_machine(targets, seconds, device), *_files(targets, device), *_network(targets, seconds)]


def _machine(targets: Targets, seconds: float, device: asyncio.Future[GpuFacts]) -> list[_Topic]:
    async def installed() -> Iterable[Finding]:
        return versions.check_versions(versions.observe_versions(targets.service), targets)

    async def limited() -> Iterable[Finding]:
        return limits.check_limits(limits.observe_limits(), targets)

    async def devices() -> Iterable[Finding]:
        return gpus.check_gpus(await device, targets) if targets.service in ("", "worker") else ()

    async def links() -> Iterable[Finding]:
        has_gpus = bool((await device).gpus)
        return fabric.check_fabric(await asyncio.to_thread(fabric.observe_fabric, seconds, has_gpus), targets)

    return [_Topic("versions", installed), _Topic("limits", limited), _Topic("gpu", devices), _Topic("fabric", links)]


def _files(targets: Targets, device: asyncio.Future[GpuFacts]) -> list[_Topic]:
    async def folder() -> Iterable[Finding]:
        facts = await asyncio.to_thread(model.observe_model, targets)
        return model.check_model(facts, targets, _capacity(targets, (await device).gpus))

    async def certified() -> Iterable[Finding]:
        facts = certificates.observe_certificates(targets)
        return certificates.check_certificates(facts, targets, certificates.now())

    async def keys() -> Iterable[Finding]:
        return api_keys.check_keys(api_keys.observe_keys(targets), targets)

    return [_Topic("model", folder), _Topic("certificates", certified), _Topic("keys", keys)]


def _network(targets: Targets, seconds: float) -> list[_Topic]:
    async def listens() -> Iterable[Finding]:
        return listening.check_listens(listening.observe_listens(targets))

    async def reached() -> Iterable[Finding]:
        return peers.check_peers(await peers.observe_peers(targets, seconds), targets)

    async def watches() -> Iterable[Finding]:
        return kubernetes.check_watches(await kubernetes.observe_watches(targets, seconds))

    async def redis_and_clock() -> Iterable[Finding]:
        facts = await redis_server.observe_redis(targets, seconds)
        clock = clocks.observe_clock(facts.offset if facts is not None else None)
        return [*redis_server.check_redis(facts, targets), *clocks.check_clock(clock)]

    return [
        _Topic("ports", listens),
        _Topic("peers", reached),
        _Topic("kubernetes", watches),
        _Topic("redis", redis_and_clock),
    ]


async def _device(targets: Targets, seconds: float) -> GpuFacts:
    if targets.service not in ("", "worker"):
        return GpuFacts()
    # PyTorch takes seconds to import; without use of a GPU, its version suffices.
    with_torch = targets.executor in ("", "cuda") and extras.installed("torch") is not None
    return await asyncio.to_thread(observe_gpus, seconds, with_torch)


def _capacity(targets: Targets, found: tuple[Gpu, ...]) -> model.Capacity:
    free = [gpu.free_mib for gpu in found if gpu.free_mib is not None]
    facts = limits.observe_limits()
    sizes = [size for size in (facts.memory, facts.container_memory) if size]
    gpu = int(max(free) * _MIB * (targets.gpu_part or 1.0)) if free else None
    return model.Capacity(gpu, min(sizes) if sizes else None)


async def _guarded(topic: _Topic, seconds: float) -> list[Finding]:
    try:
        async with asyncio.timeout(seconds):
            return list(await topic.look())
    except TimeoutError:
        return [unknown(topic.name, f"no answer within {seconds:.0f} s")]
    except Exception as error:
        return [unknown(topic.name, f"it could not be looked at: {type(error).__name__}: {error}")]
