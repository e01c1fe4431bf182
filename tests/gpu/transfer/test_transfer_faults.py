"""Faults of the KV hand-over between workers on two GPUs: the scenarios of tests/e2e, over each transport."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.engine.gpu_engines import make_model
from support.transfer import scenarios
from support.transfer.gpu_pairs import environ_of
from support.transfer.rig import TransferRig, transfer_rig

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

# Equal tokens whoever shares the batch; little memory, so that a restart takes seconds.
FLAGS = {
    "executor": "cuda",
    "dtype": "bfloat16",
    "batch_invariant": True,
    "kv_cache_memory": 1 << 30,
    "max_num_requests": 32,
    "max_model_len": 1024,
}
ENVIRONS = (environ_of(0), environ_of(1))
VOCAB_SIZE = 500
NUM_BLOCKS = 120
BLOCK_BYTES = 3 * 2 * 2 * 16 * 128 * 2  # layers, K and V, heads, tokens, head_dim, bytes


def model_in(folder: Path, name: str = "llama-128") -> str:
    (folder / name).mkdir()
    make_model(name, folder / name)
    return str(folder / name)


@pytest.fixture(scope="module", params=["ipc", "nccl", "tcp"])
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TransferRig]:
    """Yields workers on the first two GPUs, or both on the only one. Tests restart the workers that they kill."""
    folder = tmp_path_factory.mktemp(request.param)
    flags = {**FLAGS, "model": model_in(folder)}
    with transfer_rig(folder, flags, request.param, ENVIRONS, vocab_size=VOCAB_SIZE) as made:
        yield made


@pytest.mark.parametrize("state", ["accept", "moving", "first_token", "sent", "complete", "abort"])
@pytest.mark.parametrize("victim", scenarios.VICTIMS)
def test_a_worker_killed_in_any_state_leaves_nothing_behind(rig: TransferRig, victim: str, state: str) -> None:
    asyncio.run(scenarios.kill(rig, victim, state))


@pytest.mark.parametrize("victim", scenarios.VICTIMS)
def test_a_worker_suspended_for_5_s_costs_the_other_its_lease_at_most(rig: TransferRig, victim: str) -> None:
    asyncio.run(scenarios.suspend(rig, victim, "accept"))


@pytest.mark.parametrize("what", ["connection", "stream", "both"])
def test_cut_connections_are_dialled_again_without_loss(rig: TransferRig, what: str) -> None:
    asyncio.run(scenarios.cut(rig, what, "accept"))


def test_a_slow_peer_slows_only_its_own_request(rig: TransferRig) -> None:
    asyncio.run(scenarios.slow_peer(rig))


def test_bytes_corrupted_in_flight_are_in_no_token(rig: TransferRig) -> None:
    asyncio.run(scenarios.corrupted(rig, 6))


def test_both_sides_restarted_work_again(rig: TransferRig) -> None:
    asyncio.run(scenarios.both_restarted(rig))


@pytest.mark.timeout(1200)
def test_a_thousand_aborts_a_minute_leave_no_block_behind(rig: TransferRig, abort_seconds: float) -> None:
    assert asyncio.run(scenarios.aborts(rig, abort_seconds)) >= abort_seconds * 1000 / 60 * 0.6


@pytest.mark.parametrize("kind", ["ipc", "nccl"])
def test_a_full_pool_at_the_receiver_loses_no_request(kind: str, tmp_path: Path) -> None:
    flags, small = {**FLAGS, "model": model_in(tmp_path)}, {"kv_cache_memory": NUM_BLOCKS * BLOCK_BYTES}
    with transfer_rig(tmp_path, flags, kind, ENVIRONS, small, VOCAB_SIZE) as rig:
        asyncio.run(scenarios.full_pool(rig, NUM_BLOCKS))


@pytest.mark.parametrize("kind", ["ipc", "nccl"])
def test_a_peer_of_another_layout_is_refused_at_once_and_costs_no_request(kind: str, tmp_path: Path) -> None:
    flags, other = {**FLAGS, "model": model_in(tmp_path)}, {"model": model_in(tmp_path, "llama-biased-64")}
    with transfer_rig(tmp_path, flags, kind, ENVIRONS, other, VOCAB_SIZE) as rig:
        asyncio.run(scenarios.wrong_layout(rig))
