"""Weights of Transformers' models: loaded by name, reloaded, dropped and restored, and told apart by their digest."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engine.tiny_models import generate_greedily, make_model
from support.engine.tiny_transformers_models import save_tiny

from baton.rpc.errors import InvalidRequest, Mismatch
from baton.worker.config import WorkerConfig
from baton.worker.core import Request, SamplingParams, StopConditions
from baton.worker.engine.engine import Engine
from baton.worker.executors.cpu.executor import CpuExecutor
from baton.worker.models.registry import load_config
from baton.worker.models.transformers_backend import installed
from baton.worker.scheduling.settings import EngineSettings
from baton.worker.weights.loading import ModelOptions, load_model, model_bytes
from baton.worker.weights.transformers_loading import config_on

PROMPT = list(range(30, 50))
COUNT = 12


def make_executor(folder: Path, **more: object) -> CpuExecutor:
    values = {"threads": 1, "block_size": 8, "num_blocks": 20, "max_num_requests": 4, **more}
    return CpuExecutor(WorkerConfig(model=str(folder), **values))  # type: ignore[arg-type]


def tokens_of(executor: CpuExecutor) -> list[int]:
    engine = Engine(executor, EngineSettings(max_num_requests=4, max_num_batched_tokens=64), epoch=1)
    stop = StopConditions(max_tokens=COUNT)
    request = Request("0", list(PROMPT), len(PROMPT), SamplingParams(temperature=0.0), stop, bytes(16))
    engine.submit(request)
    while engine.has_work():
        assert not engine.step().failures
    return list(request.token_ids[len(PROMPT) :])


def change(folder: Path, edit: dict[str, torch.Tensor | None]) -> None:
    path = folder / "model.safetensors"
    tensors = {**load_file(path), **edit}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path, {"format": "pt"})


def test_missing_misshapen_and_unused_tensors_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_tiny(tmp_path, "arcee")
    name = "model.layers.1.mlp.up_proj.weight"
    change(tmp_path, {"model.extra": torch.zeros(3)})
    with caplog.at_level(logging.WARNING, "baton"):
        make_executor(tmp_path)
    assert "1 tensors of" in caplog.text
    assert "model.extra" in caplog.text
    change(tmp_path, {name: torch.zeros(64, 64)})
    message = rf"{name} has shape \[64, 64\]; by config.json it must be \[96, 64\]"
    with pytest.raises(InvalidRequest, match=message):
        make_executor(tmp_path)
    change(tmp_path, {name: None})
    with pytest.raises(InvalidRequest, match=f"no file holds the tensors {name}$"):
        make_executor(tmp_path)


def test_experts_of_a_sharded_checkpoint_are_converted(tmp_path: Path) -> None:
    model = save_tiny(tmp_path, "mellum")
    model.save_pretrained(tmp_path, max_shard_size="200KB")
    (tmp_path / "model.safetensors").unlink()
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert any("experts.5.up_proj" in name for name in index["weight_map"])
    assert tokens_of(make_executor(tmp_path)) == generate_greedily(model, PROMPT, COUNT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_have_the_wanted_dtype_and_the_announced_size(dtype: torch.dtype, tmp_path: Path) -> None:
    save_tiny(tmp_path, "opt")  # its embeddings are tied
    loaded = load_model(str(tmp_path), "auto", dtype)
    tensors = loaded.weights.tensors()
    assert {tensor.dtype for tensor in tensors if tensor.is_floating_point()} == {dtype}
    assert loaded.weights.num_bytes == model_bytes(loaded.config, dtype)
    file_bytes = sum(tensor.numel() for tensor in load_file(tmp_path / "model.safetensors").values()) * dtype.itemsize
    assert loaded.weights.num_bytes == file_bytes


def test_the_file_may_go_once_it_is_loaded(tmp_path: Path) -> None:
    model = save_tiny(tmp_path, "phi")
    executor = make_executor(tmp_path)
    path = tmp_path / "model.safetensors"
    with path.open("r+b") as file:
        file.write(b"\0" * path.stat().st_size)
    assert tokens_of(executor) == generate_greedily(model, PROMPT, COUNT)


def test_other_weights_of_the_architecture_can_be_used(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    one = save_tiny(first, "seed_oss")
    other = save_tiny(second, "seed_oss")
    with torch.no_grad():
        other.model.embed_tokens.weight.normal_(0.0, 0.4)
    other.save_pretrained(second)
    executor = make_executor(first)
    assert tokens_of(executor) == generate_greedily(one, PROMPT, COUNT)
    before = executor.model.digest
    executor.use_weights(executor.read_weights(str(second)))
    assert tokens_of(executor) == generate_greedily(other, PROMPT, COUNT)
    assert executor.model.digest != before
    executor.sleep(2)
    executor.wake(executor.read_weights(str(first)))
    assert tokens_of(executor) == generate_greedily(one, PROMPT, COUNT)
    save_tiny(second, "seed_oss", {"head_dim": 16})
    with pytest.raises(Mismatch, match="has another architecture"):
        executor.read_weights(str(second))


def test_random_weights_are_equal_for_equal_configs(tmp_path: Path) -> None:
    save_tiny(tmp_path, "stablelm")
    (tmp_path / "model.safetensors").unlink()
    state = torch.get_rng_state()
    one, other = (make_executor(tmp_path, load_format="dummy") for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert tokens_of(one) == tokens_of(other)
    assert one.model.digest == other.model.digest


def test_the_digest_tells_implementations_and_configs_apart(tmp_path: Path) -> None:
    make_model("llama", tmp_path)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())

    def digest(implementation: str, **changes: object) -> bytes:
        path.write_text(json.dumps({**raw, **changes}))
        return load_model(
            str(tmp_path), "auto", torch.float32, options=ModelOptions(implementation=implementation)
        ).digest

    theirs = digest("transformers")
    assert theirs != digest("baton")
    assert theirs == digest("transformers", transformers_version="5.0.0", _name_or_path="elsewhere")
    assert theirs != digest("transformers", rms_norm_eps=1e-3)


def test_the_start_says_what_computes_the_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_model("llama", tmp_path)
    with caplog.at_level(logging.INFO, "baton"):
        load_model(str(tmp_path), "auto", torch.float32)
        load_model(str(tmp_path), "auto", torch.float32, options=ModelOptions(implementation="transformers"))
    family, transformers = [line for line in caplog.messages if line.startswith("model loaded")]
    assert "LlamaForCausalLM by Baton, 3 layers" in family
    assert "LlamaForCausalLM by Transformers 5." in transformers


def test_prompts_have_the_logprobs_of_transformers(tmp_path: Path) -> None:
    model = save_tiny(tmp_path, "helium")
    engine = Engine(make_executor(tmp_path), EngineSettings(max_num_requests=4, max_num_batched_tokens=8), epoch=1)
    sampling = SamplingParams(temperature=0.0, prompt_logprobs=0)
    engine.submit(Request("0", list(PROMPT), len(PROMPT), sampling, StopConditions(max_tokens=1), bytes(16)))
    found: list[float] = []
    while engine.has_work():
        outputs = engine.step()
        assert not outputs.failures
        for _, _, entries in outputs.prompt_logprobs:
            found += [entry.logprob for entry in entries]
    with torch.no_grad():
        logprobs = model(torch.tensor([PROMPT])).logits[0, :-1].log_softmax(-1)
    expected = logprobs.gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0].tolist()
    assert found == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["arcee", "mellum"])
def test_models_can_be_made_for_any_device_with_experts_and_without(
    kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    save_tiny(tmp_path, kind)
    spec = load_config(tmp_path).transformers
    assert spec is not None
    chosen = {}
    for device in ("cuda", "cpu"):
        config = config_on(spec, dtype, torch.device(device))
        with torch.device("meta"):
            installed.made_of(spec.class_name, config, dtype)
        chosen[device] = config._experts_implementation
    assert (chosen["cuda"] == "grouped_mm") == ((kind, dtype) == ("mellum", torch.bfloat16))
    assert (chosen["cpu"] == "baton") == (kind == "mellum")


def test_longest_sequences_follow_from_yarn(tmp_path: Path) -> None:
    save_tiny(tmp_path, "arcee")
    assert load_config(tmp_path).max_model_len == 512
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 512}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "rope_parameters": rope}))
    assert load_config(tmp_path).max_model_len == 4096
