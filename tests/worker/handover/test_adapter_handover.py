"""A prompt with an adapter is handed over between workers that have the same contents of it, and no others."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from support.engine.tiny_adapters import merged, save_adapter
from support.engine.tiny_models import generate_greedily, load_transformers
from support.processes.stack import MODEL
from support.processes.worker_harness import Slot, Worker, endpoint, running_pair, submit

from baton.v1 import control_pb2, types_pb2

COUNT = 8
PROMPT = [random.Random(5).randrange(5, 4000) for _ in range(150)]
REAL = {"executor": "cpu", "model": str(MODEL), "engine_process": True, "threads": 1, "num_blocks": 400}


def oracle(folder: Path) -> list[int]:
    return generate_greedily(merged(load_transformers(MODEL), folder), PROMPT, COUNT)


async def load(worker: Worker, path: Path) -> types_pb2.AdapterInfo:
    request = control_pb2.LoadAdapterRequest(name="poet", path=str(path), replace=True)
    return (await worker.control.LoadAdapter(request)).adapter


async def generate(decode: Worker, prefill: Worker, adapter: types_pb2.AdapterInfo) -> Slot:
    fields = {"adapter": adapter.name, "adapter_info": adapter, "prefill": endpoint(prefill)}
    request = submit(0, PROMPT, COUNT, **fields)
    (slot,) = await decode.stream().generate(request)
    assert slot.failure is None, slot.failure
    return slot


@pytest.mark.timeout(180)
async def test_workers_with_other_contents_of_an_adapter_exchange_no_byte(tmp_path: Path) -> None:
    model = load_transformers(MODEL)
    first = save_adapter(model, tmp_path / "first", ["q_proj", "v_proj"], seed=1, lora_alpha=8)
    second = save_adapter(model, tmp_path / "second", ["q_proj", "v_proj"], seed=2, lora_alpha=8)
    expected = oracle(first)
    assert expected != oracle(second)
    folder = tmp_path / "served"
    shutil.copytree(first, folder)
    async with running_pair(**REAL, enable_lora=True, lora_folders=(str(tmp_path),)) as (prefill, decode):
        adapter = await load(decode, folder)
        shutil.rmtree(folder)
        shutil.copytree(second, folder)
        assert (await load(prefill, folder)).digest != adapter.digest

        slot = await generate(decode, prefill, adapter)
        assert slot.tokens == expected, "as the decode worker has it"
        assert slot.finish.num_transferred_tokens == 0
        stats = [(await worker.until_idle()).counters for worker in (prefill, decode)]
        assert [(one.num_transfers, one.num_transfer_bytes) for one in stats] == [(0, 0), (0, 0)]
        assert stats[0].adapters.num_failed_loads == 1, "its folder has another digest"
        assert stats[0].num_prompt_tokens == 0
        assert stats[1].num_local_fallbacks == 1

        shutil.rmtree(folder)
        shutil.copytree(first, folder)
        assert (await load(prefill, folder)).digest == adapter.digest
        await decode.control.ResetPrefixCache(control_pb2.ResetPrefixCacheRequest())
        slot = await generate(decode, prefill, adapter)
        assert slot.tokens == expected
        assert slot.finish.num_transferred_tokens > 0
        assert (await decode.until_idle()).counters.num_transfers == 1
        await prefill.until_idle()
