"""What can go wrong in a fleet, and when it does: a plan that a seed decides. Pure; touches no process."""

from __future__ import annotations

import enum
import random
from collections.abc import Sequence
from dataclasses import dataclass


class Fault(enum.Enum):
    """A kind of fault. Its value is its name in reports."""

    FRONT_KILLED = "front killed"
    ENGINE_KILLED = "engine killed"
    FRONT_STOPPED = "front stopped"
    ENGINE_STOPPED = "engine stopped"
    PREFILL_KILLED = "prefill worker killed"
    WORKER_RESTARTED = "worker restarted"
    LINK_CUT = "connections cut"
    LINK_STALLED = "connections stalled"
    LINK_SLOW = "connections slow"
    GATEWAY_KILLED = "gateway killed"
    GATEWAY_RESTARTED = "gateway restarted"
    ROUTER_KILLED = "router killed"
    ROUTER_STOPPED = "router stopped"
    KVSTORE_KILLED = "kvstore killed"
    REDIS_KILLED = "Redis killed"
    REDIS_STOPPED = "Redis stopped"
    REDIS_WIPED = "Redis wiped"
    REDIS_FULL = "Redis out of memory"
    POOLS_FULL = "pools full"
    CLOCK_JUMPS = "clock jumps"
    DISK_FULL = "disk full"


# Kills and stops of workers alone: what the table's first two rows are about.
KILLS = (
    Fault.FRONT_KILLED,
    Fault.ENGINE_KILLED,
    Fault.FRONT_STOPPED,
    Fault.ENGINE_STOPPED,
    Fault.PREFILL_KILLED,
)
EVERYTHING = tuple(Fault)

_DECODE = frozenset(
    (
        Fault.FRONT_KILLED,
        Fault.ENGINE_KILLED,
        Fault.FRONT_STOPPED,
        Fault.ENGINE_STOPPED,
        Fault.WORKER_RESTARTED,
        Fault.LINK_CUT,
        Fault.LINK_STALLED,
        Fault.LINK_SLOW,
    )
)
_TARGETS = {
    Fault.PREFILL_KILLED: "prefill",
    Fault.GATEWAY_KILLED: "gateway",
    Fault.GATEWAY_RESTARTED: "gateway",
    Fault.ROUTER_KILLED: "router",
    Fault.ROUTER_STOPPED: "router",
    Fault.KVSTORE_KILLED: "kvstore",
}
# What a gateway wrote down of its streams is gone with these.
_FORGETS = frozenset((Fault.REDIS_KILLED, Fault.REDIS_STOPPED, Fault.REDIS_WIPED, Fault.REDIS_FULL))
_PAUSE_SECONDS = (0.4, 0.9)
_LAST_SECONDS = (0.5, 1.5)


def target_of(fault: Fault) -> str:
    """The kind of service that is hurt. Empty: none, or all."""
    return "decode" if fault in _DECODE else _TARGETS.get(fault, "")


@dataclass(frozen=True, slots=True)
class Planned:
    """One fault of a plan."""

    fault: Fault
    target: int  # which of the services of its kind
    pause_seconds: float  # before it
    lasting_seconds: float  # until it is mended


def plan(seed: int, count: int, kinds: Sequence[Fault], sizes: dict[str, int]) -> list[Planned]:
    """`count` faults, every kind as often as the others; the same for the same arguments.

    `sizes`: services by kind. A gateway is not killed right after Redis forgot what it wrote down.
    """
    rng = random.Random(seed)
    planned: list[Planned] = []
    bag: list[Fault] = []
    while len(planned) < count:
        if not bag:
            bag = list(kinds)
            rng.shuffle(bag)
        fault = bag.pop()
        if fault is Fault.GATEWAY_KILLED and planned and planned[-1].fault in _FORGETS:
            fault = Fault.GATEWAY_RESTARTED
        size = sizes.get(target_of(fault), 1)
        if size:
            pause, lasting = rng.uniform(*_PAUSE_SECONDS), rng.uniform(*_LAST_SECONDS)
            planned.append(Planned(fault, rng.randrange(size), pause, lasting))
    return planned
