"""Workers of a pair stopped and changed while they hand KV over: nothing fails, no block is lost."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.processes.worker_harness import Slot, Worker, endpoint, running_pair, submit

from baton.v1 import control_pb2 as pb

ROOT = Path(__file__).resolve().parents[3]
MODEL = ROOT / "models" / "storyteller-7m"
PROMPTS = [[5 + (salt * 31 + index * 7) % 3000 for index in range(200)] for salt in range(24)]
KEEP = pb.RUNNING_REQUESTS_KEEP


@pytest.fixture
async def pair() -> AsyncIterator[tuple[Worker, Worker]]:
    async with running_pair(model=str(MODEL), sim_slowness=1.0) as (prefill, decode):
        yield prefill, decode


@pytest.fixture(scope="module")
def revised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "revised"
    shutil.copytree(MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "revision": 2}))
    return folder


async def generate(pair: tuple[Worker, Worker], namespace: bytes = bytes(16)) -> list[Slot]:
    prefill, decode = pair
    submits = [
        submit(slot, prompt, max_tokens=24, prefill=endpoint(prefill), cache_namespace=namespace)
        for slot, prompt in enumerate(PROMPTS)
    ]
    return await decode.stream().generate(*submits)


async def disturbed(pair: tuple[Worker, Worker], namespace: bytes, disturb: object) -> list[Slot]:
    """What is generated while `disturb` is awaited, once the first transfers ran."""
    before = (await pair[1].stats()).counters.num_transfers
    generating = asyncio.create_task(generate(pair, namespace))
    async with asyncio.timeout(20):
        while (await pair[1].stats()).counters.num_transfers == before:
            pass
    await disturb  # type: ignore[misc]
    return await generating


async def check_idle(pair: tuple[Worker, Worker]) -> None:
    for worker in pair:
        stats = await worker.until_idle()
        assert stats.counters.transfers.num_stranded_blocks == 0
        assert stats.counters.num_checksum_errors == 0


async def slept(worker: Worker) -> None:
    await worker.control.Sleep(pb.SleepRequest(running_requests=KEEP), timeout=20)
    assert (await worker.stats()).num_empty_blocks == (await worker.state()).load.num_blocks
    await worker.control.WakeUp(pb.WakeUpRequest(), timeout=20)


async def paused(worker: Worker) -> None:
    await worker.control.Pause(pb.PauseRequest(running_requests=KEEP), timeout=20)
    await worker.control.Resume(pb.ResumeRequest(), timeout=20)


async def drained(worker: Worker) -> None:
    await worker.control.Drain(pb.DrainRequest(timeout_ms=1), timeout=20)
    await worker.until_idle()
    await worker.control.Resume(pb.ResumeRequest(), timeout=20)


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("stop", [slept, paused, drained], ids=["sleep", "pause", "drain"])
async def test_a_worker_stopped_amid_hand_overs_costs_only_time(pair: tuple[Worker, Worker], side: str, stop) -> None:  # type: ignore[no-untyped-def]
    if side == "decode" and stop is drained:
        pytest.skip("what a decode worker drops is for gateways to move")
    expected = [slot.tokens for slot in await generate(pair, b"a" * 16)]
    worker = pair[0] if side == "prefill" else pair[1]
    slots = await disturbed(pair, b"b" * 16, stop(worker))
    assert [slot.failure for slot in slots] == [None] * len(slots)
    assert [slot.tokens for slot in slots] == expected
    await check_idle(pair)
    again = await generate(pair, b"c" * 16)
    assert [slot.tokens for slot in again] == expected
    await check_idle(pair)


async def test_a_pair_hands_over_again_when_both_have_other_weights(pair: tuple[Worker, Worker], revised: Path) -> None:
    expected = [slot.tokens for slot in await generate(pair, b"a" * 16)]
    request = pb.ReloadWeightsRequest(model=str(revised), running_requests=KEEP)
    for round_number, worker in enumerate(pair):
        reload = worker.control.ReloadWeights(request, timeout=20)
        slots = await generate(pair, bytes([round_number]) * 16)  # one has the new ones already: prefilled locally
        await reload
        assert [slot.failure for slot in slots] == [None] * len(slots)
    digests = {(await worker.state()).model.digest for worker in pair}
    assert len(digests) == 1
    before = (await pair[1].stats()).counters.num_transfers
    async with asyncio.timeout(20):
        while True:  # a peer that did not fit is asked again after a while
            slots = await generate(pair, before.to_bytes(15, "big") + bytes([len(digests)]))
            assert [slot.tokens for slot in slots] == expected
            if (await pair[1].stats()).counters.num_transfers > before:
                break
            digests.add(bytes([len(digests)]))
    await check_idle(pair)
