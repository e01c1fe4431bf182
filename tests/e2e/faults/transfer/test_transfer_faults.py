"""Faults of the KV hand-over between real worker processes: no block leaks, no token changes, others continue."""

from __future__ import annotations

import asyncio

import pytest
from support.transfer import scenarios
from support.transfer.rig import TransferRig

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("state", scenarios.STATES)
@pytest.mark.parametrize("victim", scenarios.VICTIMS)
def test_a_worker_killed_in_any_state_leaves_nothing_behind(sim: TransferRig, victim: str, state: str) -> None:
    if sim.transports != "tcp" and state not in ("accept", "moving", "sent"):
        pytest.skip("the words are those of tcp")
    asyncio.run(scenarios.kill(sim, victim, state))


@pytest.mark.parametrize("state", ["moving"])
@pytest.mark.parametrize("victim", scenarios.VICTIMS)
def test_a_worker_suspended_for_5_s_costs_the_other_its_lease_at_most(
    sim: TransferRig, victim: str, state: str
) -> None:
    asyncio.run(scenarios.suspend(sim, victim, state))


@pytest.mark.parametrize("state", ["moving", "sent"])
@pytest.mark.parametrize("what", ["connection", "stream", "both"])
def test_cut_connections_are_dialled_again_without_loss(sim: TransferRig, what: str, state: str) -> None:
    asyncio.run(scenarios.cut(sim, what, state))


def test_a_pulled_cable_keeps_no_block_of_an_aborted_request(sim: TransferRig) -> None:
    asyncio.run(scenarios.cable_pulled(sim))


def test_a_slow_peer_slows_only_its_own_request(sim: TransferRig) -> None:
    asyncio.run(scenarios.slow_peer(sim))


@pytest.mark.parametrize("num_flips", [1, 12])
def test_bytes_corrupted_in_flight_are_in_no_token(sim: TransferRig, num_flips: int) -> None:
    asyncio.run(scenarios.corrupted(sim, num_flips))


def test_both_sides_restarted_work_again(sim: TransferRig) -> None:
    asyncio.run(scenarios.both_restarted(sim))


def test_a_failure_reports_the_stack_of_each_thread(sim: TransferRig) -> None:
    found = dict(sim.autopsies())
    assert found.keys() == {"p", "d"}
    for text in found.values():
        assert text.startswith("alive\n")
        assert text.count("Fatal Python error: Aborted") == 2, "of front and engine"
        assert "process/loop.py" in text
    asyncio.run(sim.assert_transfers())
