"""Faults of the KV hand-over of models with states, latents and windows: no block leaks, and no token changes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from support.engine.tiny_models import make_model
from support.engine.tiny_shape import VOCAB_SIZE
from support.transfer import scenarios
from support.transfer.rig import TransferRig, transfer_rig

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module", params=["qwen3_next", "granitemoehybrid-mamba", "deepseek_v3", "gemma3_text"])
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TransferRig]:
    """Workers on the CPU. Tests restart those that they kill."""
    folder = tmp_path_factory.mktemp(request.param)
    make_model(request.param, folder)
    flags = {"executor": "cpu", "model": str(folder), "threads": 1, "num_blocks": 600}
    with transfer_rig(folder, flags, vocab_size=VOCAB_SIZE) as made:
        yield made


@pytest.mark.parametrize("state", ["accept", "moving", "sent", "complete"])
@pytest.mark.parametrize("victim", scenarios.VICTIMS)
def test_a_killed_worker_leaves_nothing_behind(rig: TransferRig, victim: str, state: str) -> None:
    asyncio.run(scenarios.kill(rig, victim, state))


@pytest.mark.parametrize("what", ["connection", "stream"])
def test_cuts_change_no_token(rig: TransferRig, what: str) -> None:
    asyncio.run(scenarios.cut(rig, what, "moving"))


def test_corrupted_bytes_are_in_no_token(rig: TransferRig) -> None:
    asyncio.run(scenarios.corrupted(rig, 3))


def test_a_suspended_prefill_worker_changes_no_token(rig: TransferRig) -> None:
    asyncio.run(scenarios.suspend(rig, "prefill", "moving"))


def test_aborts_leave_no_block_behind(rig: TransferRig) -> None:
    asyncio.run(scenarios.aborts(rig, 3.0, per_minute=300))
