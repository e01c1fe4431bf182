"""Clients that leave, full pools and peers of another model amid the KV hand-over; and faults with the model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from support.transfer import scenarios
from support.transfer.rig import CPU, SIM, TRANSPORTS, TransferRig, transfer_rig

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def cpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TransferRig]:
    """The sample model on the CPU."""
    with transfer_rig(tmp_path_factory.mktemp("cpu"), CPU) as rig:
        yield rig


@pytest.mark.timeout(1200)
def test_a_thousand_aborts_a_minute_leave_no_block_behind(sim: TransferRig, abort_seconds: float) -> None:
    assert asyncio.run(scenarios.aborts(sim, abort_seconds)) >= abort_seconds * 1000 / 60 * 0.6


@pytest.mark.parametrize("kind", TRANSPORTS)
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
def test_with_the_model_cuts_change_no_token(cpu: TransferRig, what: str) -> None:
    asyncio.run(scenarios.cut(cpu, what, "moving"))


def test_with_the_model_corrupted_bytes_are_in_no_token(cpu: TransferRig) -> None:
    asyncio.run(scenarios.corrupted(cpu, 3))


def test_with_the_model_a_suspended_prefill_worker_changes_no_token(cpu: TransferRig) -> None:
    asyncio.run(scenarios.suspend(cpu, "prefill", "moving"))


def test_with_the_model_aborts_leave_no_block_behind(cpu: TransferRig) -> None:
    asyncio.run(scenarios.aborts(cpu, 5.0, per_minute=300))
