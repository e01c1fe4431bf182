"""Faults of the KV hand-over between real worker processes: no block stays behind, no token changes, nobody notices."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterator

import pytest
from support.transfer import scenarios
from support.transfer.rig import CPU, SIM, TransferRig, transfer_rig

pytestmark = pytest.mark.timeout(300)

TRANSPORTS = ("tcp", "ipc")


def _has(transport: str) -> bool:
    return transport == "tcp" or importlib.util.find_spec("baton.worker.transfer.kinds.ipc.host") is not None


KINDS = [kind for kind in TRANSPORTS if _has(kind)]


@pytest.fixture(scope="module", params=KINDS)
def sim(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TransferRig]:
    """Simulated devices. Tests restart what they kill."""
    with transfer_rig(tmp_path_factory.mktemp("sim"), SIM, request.param) as rig:
        yield rig


@pytest.fixture(scope="module")
def cpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TransferRig]:
    """The sample model on the CPU."""
    with transfer_rig(tmp_path_factory.mktemp("cpu"), CPU) as rig:
        yield rig


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
def test_what_is_cut_is_dialled_again_and_costs_only_time(sim: TransferRig, what: str, state: str) -> None:
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


def test_a_failure_can_tell_what_each_thread_was_at(sim: TransferRig) -> None:
    found = dict(sim.autopsies())
    assert found.keys() == {"p", "d"}
    for text in found.values():
        assert text.startswith("alive\n")
        assert text.count("Fatal Python error: Aborted") == 2, "of front and engine"
        assert "process/loop.py" in text
    asyncio.run(sim.assert_transfers())


@pytest.mark.timeout(1200)
def test_a_thousand_aborts_a_minute_leave_no_block_behind(sim: TransferRig, abort_seconds: float) -> None:
    assert asyncio.run(scenarios.aborts(sim, abort_seconds)) >= abort_seconds * 1000 / 60 * 0.6


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_pool_at_the_receiver_loses_no_request(kind: str, tmp_path) -> None:
    with transfer_rig(tmp_path, SIM, kind, decode_flags={"num_blocks": 120}) as rig:
        asyncio.run(scenarios.full_pool(rig, 120))


def test_a_peer_of_another_model_is_refused_at_once_and_costs_no_request(tmp_path) -> None:
    with transfer_rig(tmp_path, SIM, decode_flags={"sim_eos_every": 1000}) as rig:
        asyncio.run(scenarios.wrong_layout(rig))


@pytest.mark.parametrize("victim", scenarios.VICTIMS)
def test_with_the_model_a_killed_worker_leaves_nothing_behind(cpu: TransferRig, victim: str) -> None:
    asyncio.run(scenarios.kill(cpu, victim, "moving"))


@pytest.mark.parametrize("what", ["connection", "stream"])
def test_with_the_model_what_is_cut_changes_no_token(cpu: TransferRig, what: str) -> None:
    asyncio.run(scenarios.cut(cpu, what, "moving"))


def test_with_the_model_corrupted_bytes_are_in_no_token(cpu: TransferRig) -> None:
    asyncio.run(scenarios.corrupted(cpu, 3))


def test_with_the_model_a_suspended_prefill_worker_changes_no_token(cpu: TransferRig) -> None:
    asyncio.run(scenarios.suspend(cpu, "prefill", "moving"))


def test_with_the_model_aborts_leave_no_block_behind(cpu: TransferRig) -> None:
    asyncio.run(scenarios.aborts(cpu, 5.0, per_minute=300))
