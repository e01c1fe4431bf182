"""A state that holds NaN ends its request with a typed error, at once, and no other request."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.engine.engine_harness import Rig, make_request, make_rig
from support.engine.tiny_models import generate_greedily, make_model

from baton.rpc.errors import DataLoss
from baton.worker.config import WorkerConfig
from baton.worker.core import BlockId, Request
from baton.worker.executors.cpu.executor import CpuExecutor


def rig_of(folder: Path) -> Rig:
    executor = CpuExecutor(WorkerConfig(model=str(folder), threads=1, block_size=16, num_blocks=64))
    return make_rig(executor, max_num_batched_tokens=48)


def damage(rig: Rig, request: Request, group: int, place: int) -> None:
    """Writes a NaN to the newest state of a running request."""
    executor = rig.engine._executor
    assert isinstance(executor, CpuExecutor)
    (blocks,) = rig.engine._states[request.request_id].partial
    pages = torch.tensor([blocks.newest().block_ids])
    states = executor._memory.states[group]
    values = states.load(place, pages)
    values[0, len(values[0]) // 2] = torch.nan
    states.store(place, pages, values)


@pytest.mark.parametrize(("name", "place", "layer"), [("qwen3_next", 1, 2), ("lfm2", 0, 0), ("lfm2", 1, 2)])
def test_a_damaged_state_ends_its_request_with_the_layer_and_no_other(
    name: str, place: int, layer: int, tmp_path: Path
) -> None:
    model = make_model(name, tmp_path)
    rig = rig_of(tmp_path)
    requests = [make_request(prompt, 12) for prompt in ([7, 8, 9], list(range(5, 30)), [11, 12, 13, 14])]
    for request in requests:
        rig.submit(request)
    while any(len(rig.seen.tokens.get(request.request_id, [])) < 3 for request in requests):
        rig.step()
    damage(rig, requests[1], 1, place)
    before = list(rig.seen.tokens[requests[1].request_id])
    while len(rig.seen.finishes) + len(rig.seen.failures) < 3:
        rig.step()
    error = rig.seen.failures[requests[1].request_id]
    assert isinstance(error, DataLoss)
    assert f"the state of layer {layer} holds NaN after " in error.message
    for request in requests:
        prompt = list(request.token_ids[: request.num_prompt_tokens])
        found = rig.seen.tokens[request.request_id]
        assert found == generate_greedily(model, prompt, 12)[: len(before) if request is requests[1] else 12]
    rig.engine.audit()


def test_a_damaged_state_of_another_worker_is_not_written(tmp_path: Path) -> None:
    make_model("lfm2", tmp_path)
    executor = rig_of(tmp_path).engine._executor
    spec = executor.kv_spec
    pages = [BlockId(page) for page in range(spec.pages_each(spec.groups[1]))]
    values = torch.ones(spec.layer_bytes(2) // 4)
    values[3] = torch.nan
    with pytest.raises(DataLoss, match="the state of layer 2 that another worker sent holds NaN"):
        executor.write_blocks(2, pages, memoryview(values.numpy()).cast("B"))
    assert not np.frombuffer(executor.read_blocks(2, pages), np.float32).any()
