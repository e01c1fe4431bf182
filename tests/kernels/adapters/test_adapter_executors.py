"""Adapters on the CUDA executor, in Triton's interpreter, against Transformers with each one merged in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.engine.interpreted_card import use_interpreted_card
from support.engine.step_harness import StepHarness
from support.engine.tiny_adapters import linears_of, merged, save_adapter
from support.engine.tiny_expert_adapters import merged_experts, save_expert_adapter
from support.engine.tiny_models import generate_greedily, make_model, prompts

from baton.rpc.errors import InvalidRequest
from baton.worker.config import WorkerConfig
from baton.worker.executors.base import ServingExecutor
from baton.worker.executors.factory import make_executor

pytestmark = pytest.mark.interpreted

COUNT = 4


def start(folder: Path, **fields: Any) -> ServingExecutor:
    values = {"executor": "cuda", "dtype": "float32", "max_num_requests": 8, "num_blocks": 64, "cuda_graphs": False}
    return make_executor(WorkerConfig(model=str(folder), enable_lora=True, max_loras=3, **{**values, **fields}))


@pytest.mark.parametrize("family", ["llama", "cohere", "gpt2"])
def test_a_batch_of_adapters_equals_the_merged_models(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(family, tmp_path / "base")
    names = sorted({name.rpartition(".")[2] for name in linears_of(model)})
    folders = [
        save_adapter(model, tmp_path / "all", names, rank=4, embedding=True, head=True),
        save_adapter(model, tmp_path / "some", names[::2], rank=20, seed=1, use_rslora=True),
    ]
    oracles = [model, *(merged(model, folder) for folder in folders)]
    use_interpreted_card(monkeypatch)
    executor = start(tmp_path / "base")
    assert executor.adapters is not None
    for slot, folder in enumerate(folders, 1):
        executor.adapters.write(slot, executor.adapters.read(str(folder)))
    harness, asked = StepHarness(executor), prompts(6, 20)
    slots = [(-1, 1, 2)[index % 3] for index in range(len(asked))]
    running = [harness.admit(prompt, adapter_slot=slot) for prompt, slot in zip(asked, slots, strict=True)]
    harness.run(COUNT, 9)
    expected = [
        generate_greedily(oracles[max(0, slot)], prompt, COUNT) for prompt, slot in zip(asked, slots, strict=True)
    ]
    assert [one.output[:COUNT] for one in running] == expected
    base = [generate_greedily(model, prompt, COUNT) for prompt in asked]
    assert sum(one != other for one, other in zip(base, expected, strict=True)) == 4, "adapters change the tokens"


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_experts_may_be_changed(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(family, tmp_path / "base")
    forms: list[dict[str, Any]] = [{}, {"parameters": ("down_proj",)}]
    folders = [
        save_expert_adapter(model, tmp_path / str(index), seed=index, rank=2 + index, **form)
        for index, form in enumerate(forms)
    ]
    oracles = [model, *(merged_experts(model, folder, **form) for folder, form in zip(folders, forms, strict=True))]
    use_interpreted_card(monkeypatch)
    executor = start(tmp_path / "base", max_lora_expert_rank=4)
    assert executor.adapters is not None
    for slot, folder in enumerate(folders):
        executor.adapters.write(slot, executor.adapters.read(str(folder)))
    harness, asked = StepHarness(executor), prompts(3, 12)
    running = [harness.admit(prompt, adapter_slot=index - 1) for index, prompt in enumerate(asked)]
    harness.run(3, 9)
    expected = [generate_greedily(oracle, prompt, 3) for oracle, prompt in zip(oracles, asked, strict=True)]
    assert [one.output[:3] for one in running] == expected
    assert [generate_greedily(model, prompt, 3) for prompt in asked[1:]] != expected[1:], "adapters change the tokens"


def test_slots_that_do_not_fit_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model("llama", tmp_path)
    use_interpreted_card(monkeypatch)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda *_: (1 << 20, 80 << 30))
    with pytest.raises(InvalidRequest, match="max_loras=3 adapters of max_lora_rank=512 need") as raised:
        start(tmp_path, max_lora_rank=512)
    assert raised.value.field == "max_loras"
