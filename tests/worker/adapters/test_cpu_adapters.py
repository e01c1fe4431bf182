"""Adapters on the CPU executor, beside one another in a batch, against Transformers with each one merged in."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine.packed import models as packed_models
from support.engine.step_harness import StepHarness
from support.engine.tiny_adapters import linears_of, merged, save_adapter
from support.engine.tiny_models import generate_greedily, make_model, prompts
from transformers import PreTrainedModel

from baton.rpc.errors import Unsupported
from baton.worker.config import WorkerConfig
from baton.worker.core import SamplingParams
from baton.worker.executors.cpu.executor import CpuExecutor

COUNT = 16
ALL = ()
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
# One row for each way in which a checkpoint's linears become ours.
FAMILIES = ["llama-biased", "qwen3", "phi3", "gemma2", "gemma3", "gpt2", "gpt_neox", "cohere", "granitemoehybrid"]


def make_executor(folder: Path, **config: Any) -> CpuExecutor:
    values = {"threads": 1, "block_size": 8, "num_blocks": 256, "max_num_requests": 16, "enable_lora": True}
    return CpuExecutor(WorkerConfig(model=str(folder), **{**values, "max_loras": 4, **config}))


class Served:
    """A base model and adapters of it, each in a slot."""

    def __init__(self, model: PreTrainedModel, base: Path, folders: Sequence[Path], **config: Any) -> None:
        self.oracles = [model, *(merged(model, folder) for folder in folders)]
        self.executor = make_executor(base, **config)
        self.harness = StepHarness(self.executor)
        assert self.executor.adapters is not None
        for slot, folder in enumerate(folders):
            self.executor.adapters.write(slot, self.executor.adapters.read(str(folder)))

    def check(self, chunk: int = 10**6, count: int = COUNT) -> None:
        """Runs two prompts for the base and for each adapter, all in one batch."""
        asked = prompts(2 * len(self.oracles), 40)
        running = [
            self.harness.admit(prompt, adapter_slot=index % len(self.oracles) - 1) for index, prompt in enumerate(asked)
        ]
        self.harness.run(count, chunk)
        expected = [
            generate_greedily(self.oracles[i % len(self.oracles)], prompt, count) for i, prompt in enumerate(asked)
        ]
        assert [one.output[:count] for one in running] == expected
        base = [generate_greedily(self.oracles[0], prompt, count) for prompt in asked]
        changed = [i for i in range(len(asked)) if i % len(self.oracles) and base[i] != expected[i]]
        assert len(changed) == len(asked) - 2, "every adapter changes the tokens"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_of_adapters_equals_the_merged_models(family: str, tmp_path: Path) -> None:
    model = make_model(family, tmp_path / "base")
    names = sorted({name.rpartition(".")[2] for name in linears_of(model)})
    folders = [
        save_adapter(model, tmp_path / "all", names, rank=4),
        save_adapter(model, tmp_path / "some", names[::2], rank=8, seed=1, use_rslora=True),
        save_adapter(model, tmp_path / "one", names[-1:], rank=1, seed=2, lora_alpha=6),
    ]
    Served(model, tmp_path / "base", folders).check(chunk=9)


def test_ranks_and_scales_may_differ_by_module(tmp_path: Path) -> None:
    model = make_model("llama", tmp_path / "base")
    patterns = {"rank_pattern": {"layers.1.*": 7, "up_proj": 2}, "alpha_pattern": {"q_proj": 3.5}}
    folders = [
        save_adapter(model, tmp_path / "a", rank=5, **patterns),
        save_adapter(model, tmp_path / "b", ["o_proj", "gate_proj"], rank=33, seed=1, lora_alpha=4),
    ]
    Served(model, tmp_path / "base", folders).check()


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma"])
def test_the_embedding_may_be_changed(family: str, tmp_path: Path) -> None:
    model = make_model(family, tmp_path / "base")
    folders = [
        save_adapter(model, tmp_path / "a", ATTENTION, embedding=True),
        save_adapter(model, tmp_path / "b", ["nothing"], embedding=True, seed=1),
    ]
    Served(model, tmp_path / "base", folders).check()


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma", "gemma2", "cohere", "gpt2", "gpt_neox"])
def test_the_head_may_be_changed(family: str, tmp_path: Path) -> None:
    model = make_model(family, tmp_path / "base")
    names = sorted({name.rpartition(".")[2] for name in linears_of(model)})
    folders = [
        save_adapter(model, tmp_path / "a", names, head=True, embedding=True),
        save_adapter(model, tmp_path / "b", names, rank=8, seed=1),
        save_adapter(model, tmp_path / "c", ["nothing"], rank=8, seed=2, head=True),
    ]
    Served(model, tmp_path / "base", folders).check(chunk=9)


def test_prompts_are_scored_by_the_changed_head(tmp_path: Path) -> None:
    model = make_model("llama", tmp_path / "base")
    folders = [save_adapter(model, tmp_path / "a", head=True), save_adapter(model, tmp_path / "b", seed=1)]
    served = Served(model, tmp_path / "base", folders)
    prompt = prompts(1, 40)[0]
    params = SamplingParams(temperature=0.0, prompt_logprobs=0)
    running = [served.harness.admit(prompt, sampling=params, adapter_slot=slot) for slot in (0, -1, 1)]
    served.harness.run(2)
    for one, oracle in zip(running, (served.oracles[1], served.oracles[0], served.oracles[2]), strict=True):
        with torch.no_grad():
            expected = oracle(torch.tensor([prompt])).logits[0].log_softmax(-1)
        found = [entry.logprob for entry in one.prompt_logprobs]
        wanted = [float(expected[place, token]) for place, token in enumerate(prompt[1:])]
        assert found == pytest.approx(wanted, abs=1e-4)


def test_a_slot_can_be_written_again(tmp_path: Path) -> None:
    model = make_model("llama", tmp_path / "base")
    first = save_adapter(model, tmp_path / "a", rank=6)
    second = save_adapter(model, tmp_path / "b", ["v_proj"], rank=3, seed=1)
    served = Served(model, tmp_path / "base", [first])
    served.check()
    for running in list(served.harness.running):
        served.harness.free(running)
    served.executor.adapters.write(0, served.executor.adapters.read(str(second)))
    served.oracles[1] = merged(model, second)
    served.check()


def test_adapters_of_half_precision_are_read_in_the_models_dtype(tmp_path: Path) -> None:
    model = make_model("llama", tmp_path / "base")
    Served(model, tmp_path / "base", [save_adapter(model, tmp_path / "a", dtype=torch.bfloat16)]).check()


@pytest.mark.parametrize("form", ["fp8-blocks", "awq", "gptq-order"])
def test_packed_weights_have_adapters_too(form: str, tmp_path: Path) -> None:
    model = packed_models.write(tmp_path / "base", packed_models.dense(), packed_models.FORMATS[form])
    folders = [
        save_adapter(model, tmp_path / "a", rank=4),
        save_adapter(model, tmp_path / "b", ["v_proj", "o_proj", "up_proj"], rank=9, seed=1),
    ]
    Served(model, tmp_path / "base", folders).check(chunk=9)


def test_a_step_without_adapters_computes_what_a_worker_without_them_does(tmp_path: Path) -> None:
    model = make_model("llama", tmp_path / "base")
    results = []
    for enabled in (True, False):
        executor = make_executor(tmp_path / "base", enable_lora=enabled)
        if executor.adapters is not None:
            executor.adapters.write(0, executor.adapters.read(str(save_adapter(model, tmp_path / "a"))))
        harness = StepHarness(executor)
        running = [harness.admit(prompt) for prompt in prompts(4, 40)]
        harness.run(COUNT)
        results.append([(one.output, [entry.logprob for entry in one.logprobs]) for one in running])
    assert results[0] == results[1]


def test_models_of_transformers_have_no_adapters(tmp_path: Path) -> None:
    make_model("llama", tmp_path / "base")
    with pytest.raises(Unsupported, match="needs layers of Baton") as raised:
        make_executor(tmp_path / "base", model_impl="transformers")
    assert raised.value.field == "enable_lora"
