"""Adapters on the CUDA executor, beside one another in a batch, against Transformers with each one merged in."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine.gpu_engines import check_greedy, executor_for, leader_of, make_model, make_prompts
from support.engine.step_harness import StepHarness
from support.engine.tiny_adapters import linears_of, merged, save_adapter
from support.engine.tiny_expert_adapters import merged_experts, save_expert_adapter
from transformers import PreTrainedModel

from baton.rpc.errors import InvalidRequest
from baton.worker.executors.base import Executor

pytestmark = pytest.mark.gpu

COUNT = 12
FP32_ROUNDING = 1e-3
BF16_ROUNDING = 0.06
# One for each way in which a checkpoint's linears become ours, and in which steps are computed.
FAMILIES = ["llama-128", "qwen3-96", "phi3-64", "gemma2-128", "gpt2-64", "gpt_neox-64", "cohere-64"]


def start(folder: Path, **fields: Any) -> Executor:
    return executor_for(folder, **{"enable_lora": True, "max_loras": 4, **fields})


def load(executor: Executor, slot: int, folder: Path) -> None:
    assert executor.adapters is not None
    executor.adapters.write(slot, executor.adapters.read(str(folder)))


def generate(
    executor: Executor, prompts: Sequence[Sequence[int]], slots: Sequence[int], chunk: int = 300, count: int = COUNT
) -> list[list[int]]:
    harness = StepHarness(executor)
    running = [harness.admit(list(prompt), adapter_slot=slot) for prompt, slot in zip(prompts, slots, strict=True)]
    harness.run(count, chunk)
    return [one.output[:count] for one in running]


def check(
    oracles: Sequence[PreTrainedModel], executor: Executor, rounding: float = FP32_ROUNDING, **options: int
) -> None:
    """Runs prompts of the base, the first oracle, and of each adapter, all in one batch."""
    prompts = make_prompts((3, 40, 17, 64, 9, 31, 5, 77))
    slots = [index % len(oracles) - 1 for index in range(len(prompts))]
    outputs = generate(executor, prompts, slots, **options)
    for slot, oracle in enumerate(oracles, -1):
        own = [index for index, one in enumerate(slots) if one == slot]
        some = [[part[index] for index in own] for part in (prompts, outputs)]
        assert check_greedy(oracle, *some, rounding) > len(own) * COUNT // 3
    base = generate(executor, prompts, [-1] * len(prompts), **options)
    assert sum(one != other for one, other in zip(base, outputs, strict=True)) > len(prompts) // 2


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_of_adapters_equals_the_merged_models(family: str, graphs: bool, tmp_path: Path) -> None:
    model = make_model(family, tmp_path / "base").cpu()
    names = sorted({name.rpartition(".")[2] for name in linears_of(model)})
    folders = [
        save_adapter(model, tmp_path / "all", names, rank=4, embedding=True, head=True),
        save_adapter(model, tmp_path / "some", names[::2], rank=64, seed=1, use_rslora=True, lora_alpha=8),
        save_adapter(model, tmp_path / "one", names[-1:], rank=1, seed=2, lora_alpha=6),
    ]
    oracles = [one.cuda() for one in (model, *(merged(model, folder) for folder in folders))]
    executor = start(tmp_path / "base", cuda_graphs=graphs)
    for slot, folder in enumerate(folders):
        load(executor, slot, folder)
    check(oracles, executor, chunk=21)
    executor.close()


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("family", ["mixtral-64", "qwen3_moe-128", "gpt_oss-64"])
def test_a_batch_of_adapters_of_experts_equals_the_merged_models(family: str, graphs: bool, tmp_path: Path) -> None:
    model = make_model(family, tmp_path / "base").cpu()
    forms: list[dict[str, Any]] = [{}, {"parameters": ("down_proj",)}, {"parameters": ("gate_up_proj",)}]
    folders = [
        save_expert_adapter(model, tmp_path / str(index), seed=index, rank=2 + index, **form)
        for index, form in enumerate(forms)
    ]
    merged_models = (merged_experts(model, folder, **form) for folder, form in zip(folders, forms, strict=True))
    oracles = [one.cuda() for one in (model, *merged_models)]
    executor = start(tmp_path / "base", cuda_graphs=graphs, max_lora_expert_rank=4)
    for slot, folder in enumerate(folders):
        load(executor, slot, folder)
    check(oracles, executor, chunk=21)
    executor.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ranks_over_one_block_are_summed(dtype: str, tmp_path: Path) -> None:
    stored = getattr(torch, dtype)
    model = make_model("llama-128", tmp_path / "base", stored).cpu()
    folder = save_adapter(model, tmp_path / "a", rank=200, lora_alpha=4, dtype=stored)
    other = save_adapter(model, tmp_path / "b", rank=72, seed=1, lora_alpha=2, dtype=stored)
    executor = start(tmp_path / "base", dtype=dtype, max_lora_rank=256)
    load(executor, 2, folder)
    load(executor, 1, other)
    prompts = make_prompts((20, 3, 90, 41, 7, 12, 33, 60))
    outputs = generate(executor, prompts, [2, 1] * 4)
    rounding = FP32_ROUNDING if dtype == "float32" else BF16_ROUNDING
    for first, one in enumerate((folder, other)):
        oracle = merged(model, one).cuda()
        assert check_greedy(oracle, prompts[first::2], outputs[first::2], rounding) > COUNT
    executor.close()


def test_in_bfloat16_the_first_choice_is_the_same_beyond_rounding(tmp_path: Path) -> None:
    model = make_model("llama-128", tmp_path / "base", torch.bfloat16).cpu()
    folders = [
        save_adapter(model, tmp_path / name, rank=rank, seed=rank, lora_alpha=1, dtype=torch.bfloat16)
        for name, rank in (("a", 8), ("b", 16))
    ]
    executor = start(tmp_path / "base", dtype="bfloat16")
    for slot, folder in enumerate(folders):
        load(executor, slot, folder)
    oracles = [one.cuda() for one in (model, *(merged(model, folder) for folder in folders))]
    check(oracles, executor, BF16_ROUNDING)
    executor.close()


def test_a_step_without_adapters_computes_what_a_worker_without_them_does(tmp_path: Path) -> None:
    model = make_model("llama-128", tmp_path / "base", torch.bfloat16)
    prompts, results = make_prompts((3, 40, 17, 64, 350)), []
    for enabled in (True, False):
        executor = start(tmp_path / "base", dtype="bfloat16", enable_lora=enabled)
        if enabled:
            load(executor, 0, save_adapter(model.cpu(), tmp_path / "a", dtype=torch.bfloat16))
        results.append(generate(executor, prompts, [-1] * len(prompts), count=30))
        executor.close()
    assert results[0] == results[1]


def test_slots_are_written_beside_running_steps(tmp_path: Path) -> None:
    model = make_model("llama-128", tmp_path / "base").cpu()
    first = save_adapter(model, tmp_path / "a", rank=6)
    second = save_adapter(model, tmp_path / "b", ["v_proj", "up_proj"], rank=64, seed=1, lora_alpha=8)
    executor = start(tmp_path / "base")
    load(executor, 0, first)
    prompts = make_prompts((20, 31, 7))
    undisturbed = generate(executor, prompts, [0, -1, 0], count=60)
    ended = threading.Event()

    def write() -> None:
        while not ended.is_set():
            load(executor, 1, second)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        disturbed = generate(executor, prompts, [0, -1, 0], count=60)
    finally:
        ended.set()
        thread.join()
    assert disturbed == undisturbed
    outputs = generate(executor, prompts, [1, 1, 1])
    assert check_greedy(merged(model, second).cuda(), prompts, outputs, FP32_ROUNDING) > COUNT
    executor.close()


def test_adapters_outlive_a_sleep(tmp_path: Path) -> None:
    model = make_model("llama-128", tmp_path / "base").cpu()
    executor = start(tmp_path / "base")
    load(executor, 3, save_adapter(model, tmp_path / "a", rank=6))
    prompts = make_prompts((20, 31, 7))
    before = generate(executor, prompts, [3, -1, 3])
    leader = leader_of(executor)
    leader.sleep(1)
    leader.wake(None)
    assert generate(executor, prompts, [3, -1, 3]) == before
    executor.close()


def test_slots_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    make_model("llama-128", tmp_path / "base")
    with pytest.raises(InvalidRequest, match="max_loras=4096 adapters of max_lora_rank=512") as raised:
        start(tmp_path / "base", max_loras=4096, max_lora_rank=512)
    assert raised.value.field == "max_loras"
