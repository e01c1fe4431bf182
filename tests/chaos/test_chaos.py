"""A few of every kind of fault on a real fleet; `make chaos` is the long form."""

from __future__ import annotations

import asyncio

import pytest
from chaos.audit import audit
from chaos.disturb import disturb
from chaos.fleet.actors import ask_redis, hurt
from chaos.fleet.faults import Fault, Planned
from chaos.fleet.fleet import Shape, running_fleet
from chaos.streams.client import Client
from support.processes.stack import wait_until

_FAULTS = (
    Fault.ENGINE_STOPPED,
    Fault.DISK_FULL,
    Fault.LINK_STALLED,
    Fault.CLOCK_JUMPS,
    Fault.ROUTER_KILLED,
    Fault.REDIS_WIPED,
    Fault.FRONT_KILLED,
)
_SHAPE = Shape(decode=2, prefill=1, proxied=True, worker_flags=("--sim-step-seconds", "0.02"))


@pytest.mark.timeout(300)
def test_no_stream_notices_a_fault_and_nothing_is_left_behind(tmp_path):
    planned = [Planned(fault, number, 0.3, 0.5) for number, fault in enumerate(_FAULTS)]
    with running_fleet(tmp_path, _SHAPE) as fleet:
        client = Client(fleet.rest, fleet.api_key)
        result = asyncio.run(disturb(fleet, client, planned, load=0.3, max_tokens=60))
        assert result.wrong == []
        assert result.num_good == result.num_streams > 0
        assert result.counted["failovers"] > 0, "the faults hit nothing"
        assert audit(fleet, reports_lost=True).problems == ()  # a router was killed
        # The faults are real.
        mend = hurt(fleet, Planned(Fault.REDIS_FULL, 0, 0.0, 0.0))
        refused = ask_redis(fleet, "SET", "key", "value")
        assert "OOM" in str(refused)
        mend()
        wait_until(lambda: ask_redis(fleet, "SET", "key", "value") == b"OK", "Redis takes writes again")
