"""The services that this one connects to: whether they respond and accept its certificate."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.rpc.address import split_address
from baton.rpc.channel import Dial
from baton.rpc.errors import InvalidRequest
from baton.rpc.tls.credentials import Tls
from baton.services.doctor.finding import Finding, failed, ok, warning
from baton.services.doctor.targets import Address, Targets

_TOPIC = "peers"
_SERVING = "SERVING"


@dataclass(frozen=True, slots=True)
class PeerFacts:
    """One address. `connects` is whether TCP does. `answer` is the health status or an error."""

    where: Address
    connects: bool
    answer: str


def check_peers(facts: tuple[PeerFacts, ...], targets: Targets) -> Iterator[Finding]:
    """Reports unreachable services. A warning only, because services start in any order and wait for each other."""
    for one in facts:
        what = f"{one.where.flag} {one.where.address} ({one.where.service})"
        if one.answer == _SERVING:
            yield ok(_TOPIC, f"{what} serves")
        elif not one.connects:
            fix = (
                f"start it: baton {one.where.service} --listen {one.where.address}; or a NetworkPolicy, a firewall, DNS"
            )
            yield failed(_TOPIC, f"{what}: {one.answer}", fix)
        elif one.answer == "NOT_SERVING":
            yield warning(
                _TOPIC, f"{what} is there and takes no work yet", f"baton doctor {one.where.service}; its log"
            )
        else:
            side = "plain text" if targets.tls is None else "TLS"
            fix = f"this side speaks {side}: --tls-certificate, --tls-key and --tls-ca on both sides or on none"
            yield failed(_TOPIC, f"{what}: {one.answer}", fix)


async def observe_peers(targets: Targets, seconds: float) -> tuple[PeerFacts, ...]:
    """Checks the health of all services concurrently."""
    try:
        tls = Tls(targets.tls, targets.service) if targets.tls is not None else None
    except InvalidRequest:
        tls = None  # reported by the check of certificates
        if targets.tls is not None:
            return ()
    return tuple(await asyncio.gather(*(_ask(one, tls, seconds) for one in targets.peers)))


async def _ask(where: Address, tls: Tls | None, seconds: float) -> PeerFacts:
    host, port = split_address(where.address, where.flag)
    try:
        async with asyncio.timeout(seconds):
            _, writer = await asyncio.open_connection(host.strip("[]"), port)
            writer.close()
    except TimeoutError:
        return PeerFacts(where, False, f"no connection within {seconds:.0f} s")
    except OSError as error:
        return PeerFacts(where, False, str(error.strerror or error))
    async with Dial(tls, where.service)(where.address) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check  # type: ignore[attr-defined]
        try:
            answer = await check(health_pb2.HealthCheckRequest(), timeout=seconds)
        except grpc.aio.AioRpcError as error:
            return PeerFacts(where, True, f"{error.code().name}: {error.details()}")
    return PeerFacts(where, True, health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
