"""The addresses that a service listens on: whether they are free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from baton.services import ports
from baton.services.doctor.finding import Finding, failed, ok
from baton.services.doctor.targets import Address, Targets


@dataclass(frozen=True, slots=True)
class ListenFacts:
    """One address. `problem` is empty if a service can listen on it."""

    where: Address
    problem: str = ""


def check_listens(facts: tuple[ListenFacts, ...]) -> Iterator[Finding]:
    """Reports whether addresses are free. If the service itself is running, its own ports are not a failure."""
    for one in facts:
        what = f"{one.where.flag} {one.where.address}"
        if not one.problem:
            yield ok("ports", f"{what} is free")
            continue
        port = one.where.address.rpartition(":")[2]
        fix = f"ss -ltnp 'sport = :{port}' shows who has it, this service itself if it runs; {one.where.flag} HOST:PORT"
        yield failed("ports", f"{what}: {one.problem}", fix)


def observe_listens(targets: Targets) -> tuple[ListenFacts, ...]:
    """Binds each address for a moment."""
    return tuple(ListenFacts(one, ports.why_unusable(one.address) or "") for one in targets.listens)
