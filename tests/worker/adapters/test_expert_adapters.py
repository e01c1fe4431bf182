"""Adapters of experts on the CPU executor, in PEFT's two forms, against Transformers with each one merged in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.engine.packed import models as packed_models
from support.engine.step_harness import StepHarness
from support.engine.tiny_expert_adapters import merged_experts, save_expert_adapter
from support.engine.tiny_models import generate_greedily, make_model, prompts

from baton.rpc.errors import InvalidRequest, Mismatch
from baton.worker.config import WorkerConfig
from baton.worker.executors.cpu.executor import CpuExecutor

COUNT = 10
W_NAMES = {"names": ("w1", "w3", "w2"), "old": (".mlp.", ".block_sparse_moe.")}


def start(folder: Path, **config: Any) -> CpuExecutor:
    values = {"threads": 1, "block_size": 8, "num_blocks": 256, "max_num_requests": 16, "enable_lora": True}
    values |= {"max_loras": 3, "max_lora_expert_rank": 8}
    return CpuExecutor(WorkerConfig(model=str(folder), **{**values, **config}))


@pytest.mark.parametrize(
    ("family", "apart"), [("qwen3_moe", {}), ("mixtral", W_NAMES), ("olmoe", {}), ("gpt_oss", None)]
)
def test_a_batch_of_adapters_equals_the_merged_models(
    family: str, apart: Mapping[str, Any] | None, tmp_path: Path
) -> None:
    model = make_model(family, tmp_path / "base")
    forms: list[dict[str, Any]] = [{}, {"parameters": ("down_proj",)}, {"parameters": ("gate_up_proj",)}]
    if apart is not None:
        forms[2] = {"form": "apart", **apart}
    folders = [
        save_expert_adapter(model, tmp_path / str(index), seed=index, rank=2 + index, **form)
        for index, form in enumerate(forms)
    ]
    oracles = [model, *(merged_experts(model, folder, **form) for folder, form in zip(folders, forms, strict=True))]
    executor = start(tmp_path / "base")
    assert executor.adapters is not None
    for slot, folder in enumerate(folders):
        executor.adapters.write(slot, executor.adapters.read(str(folder)))
    harness, asked = StepHarness(executor), prompts(8, 40)
    running = [harness.admit(prompt, adapter_slot=index % 4 - 1) for index, prompt in enumerate(asked)]
    harness.run(COUNT, 9)
    expected = [generate_greedily(oracles[index % 4], prompt, COUNT) for index, prompt in enumerate(asked)]
    assert [one.output[:COUNT] for one in running] == expected
    base = [generate_greedily(model, prompt, COUNT) for prompt in asked]
    assert sum(one != other for one, other in zip(base, expected, strict=True)) >= 5, "adapters change the tokens"


@pytest.mark.parametrize("form", ["fp8-blocks", "awq"])
def test_packed_experts_have_adapters_too(form: str, tmp_path: Path) -> None:
    model = packed_models.write(tmp_path / "base", packed_models.with_experts(), packed_models.FORMATS[form])
    folder = save_expert_adapter(model, tmp_path / "a")
    executor = start(tmp_path / "base")
    assert executor.adapters is not None
    executor.adapters.write(1, executor.adapters.read(str(folder)))
    harness, asked = StepHarness(executor), prompts(2, 30)
    running = [harness.admit(prompt, adapter_slot=slot) for prompt, slot in zip(asked, (1, -1), strict=True)]
    harness.run(COUNT, 9)
    oracles = (merged_experts(model, folder), model)
    expected = [generate_greedily(oracle, prompt, COUNT) for oracle, prompt in zip(oracles, asked, strict=True)]
    assert [one.output[:COUNT] for one in running] == expected
    assert generate_greedily(model, asked[0], COUNT) != expected[0], "the adapter changes the tokens"


def test_ranks_of_experts_have_a_limit_of_their_own(tmp_path: Path) -> None:
    model = make_model("qwen3_moe", tmp_path / "base")
    folder = save_expert_adapter(model, tmp_path / "a", rank=4)
    for limit in (0, 3):
        executor = start(tmp_path / "base", max_lora_expert_rank=limit)
        assert executor.adapters is not None
        with pytest.raises(InvalidRequest) as raised:
            executor.adapters.read(str(folder))
        assert f"rank 4 is above max_lora_expert_rank={limit}; start workers with --max-lora-expert-rank 4" in str(
            raised.value
        )
        assert raised.value.field == "lora_path"


def test_stacks_that_the_config_does_not_name_are_refused(tmp_path: Path) -> None:
    model = make_model("qwen3_moe", tmp_path / "base")
    executor = start(tmp_path / "base")
    assert executor.adapters is not None
    path = save_expert_adapter(model, tmp_path / "a") / "adapter_config.json"
    path.write_text(path.read_text().replace("experts.gate_up_proj", "experts.other"))
    with pytest.raises(Mismatch, match=r"does not name; the base model, Qwen3MoeForCausalLM, has .*gate_up") as raised:
        executor.adapters.read(str(tmp_path / "a"))
    assert raised.value.field == "lora_path"


def test_adapters_of_other_experts_are_refused(tmp_path: Path) -> None:
    make_model("qwen3_moe", tmp_path / "base")
    executor = start(tmp_path / "base")
    assert executor.adapters is not None
    other = make_model("mixtral", tmp_path / "other")
    with pytest.raises(Mismatch, match=r"by adapter_config\.json and the base model it must be") as raised:
        executor.adapters.read(str(save_expert_adapter(other, tmp_path / "a", linears=["nothing"])))
    assert raised.value.field == "lora_path"
