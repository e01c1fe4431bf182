"""Quantized checkpoints run as Transformers' model with the dequantized weights, and stay packed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engine.packed import models as packed_models
from support.engine.packed.models import FORMATS, change_config, write
from support.engine.step_harness import StepHarness
from support.engine.tiny_models import MODELS, generate_greedily, prompts
from support.engine.tiny_shape import VOCAB_SIZE
from transformers import PreTrainedModel

from baton.rpc.errors import InvalidRequest
from baton.worker.config import WorkerConfig
from baton.worker.executors.cpu.executor import CpuExecutor
from baton.worker.layers.cpu.device import CpuDevice
from baton.worker.layers.table import PackedTable, take
from baton.worker.models.registry import load_config
from baton.worker.quantization.base import Params
from baton.worker.quantization.quantized.method import PackedOps
from baton.worker.weights.build import weight_bytes
from baton.worker.weights.loading import load_model

COUNT = 12
PROMPTS = prompts(3, 30)


def executor(folder: Path) -> CpuExecutor:
    return CpuExecutor(WorkerConfig(model=str(folder), threads=1, block_size=8, num_blocks=64, max_num_requests=4))


def check_tokens(folder: Path, oracle: PreTrainedModel) -> CpuExecutor:
    made = executor(folder)
    harness = StepHarness(made)
    running = [harness.admit(prompt) for prompt in PROMPTS]
    harness.run(COUNT, chunk=9)
    expected = [generate_greedily(oracle, prompt, COUNT) for prompt in PROMPTS]
    assert [one.output[:COUNT] for one in running] == expected
    return made


@pytest.mark.parametrize("name", FORMATS)
def test_a_packed_model_has_the_tokens_of_its_dequantized_weights(name: str, tmp_path: Path) -> None:
    oracle = write(tmp_path, packed_models.dense(), FORMATS[name])
    made = check_tokens(tmp_path, oracle)
    config = load_config(tmp_path)
    assert made.facts.weight_bytes == weight_bytes(config, torch.float32)
    assert "unquantized" not in made.facts.weight_format


@pytest.mark.parametrize(
    "name", ["fp8-blocks", "compressed-w4a16-zeros", "awq", "gptq-order", "compressed-nvfp4", "modelopt-fp8"]
)
def test_packed_experts_have_the_tokens_of_their_dequantized_weights(name: str, tmp_path: Path) -> None:
    check_tokens(tmp_path, write(tmp_path, packed_models.with_experts(), FORMATS[name]))


@pytest.mark.parametrize("name", ["fp8-tensor", "fp8-blocks", "compressed-fp8-channel", "awq", "compressed-mxfp4"])
def test_stacked_experts_have_the_tokens_of_their_dequantized_weights(name: str, tmp_path: Path) -> None:
    made = check_tokens(tmp_path, write(tmp_path, MODELS["granitemoe"](), FORMATS[name]))
    assert made.facts.weight_bytes == weight_bytes(load_config(tmp_path), torch.float32)


@pytest.mark.parametrize(
    "name", ["fp8-blocks", "fp8-blocks-across-parts", "compressed-fp8-channel", "compressed-fp8-tensor"]
)
@pytest.mark.parametrize("model", ["deepseek_v2-lite", "deepseek_v3"])
def test_packed_latents_have_the_tokens_of_their_dequantized_weights(name: str, model: str, tmp_path: Path) -> None:
    """kv_b is dequantized at load: decodes multiply with its transpose."""
    made = check_tokens(tmp_path, write(tmp_path, MODELS[model](), FORMATS[name]))
    assert made.facts.weight_bytes == weight_bytes(load_config(tmp_path), torch.float32)
    assert "unquantized" not in made.facts.weight_format


def test_experts_of_gpt_oss_have_the_tokens_of_their_dequantized_weights(tmp_path: Path) -> None:
    check_tokens(tmp_path, packed_models.write_gpt_oss(tmp_path, MODELS["gpt_oss"]()))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.mlp.experts.down_proj_scales"][2, 3] = 255
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(
        InvalidRequest, match=r"layers\.1\.mlp\.experts\.down_proj_scales holds 3 exponents that mean NaN"
    ):
        load_model(str(tmp_path), "auto", torch.float32)


@pytest.mark.parametrize("name", ["mxfp4", "fp8-blocks", "compressed-mxfp4"])
def test_random_weights_in_a_format_are_numbers(name: str, tmp_path: Path) -> None:
    if name == "mxfp4":
        packed_models.write_gpt_oss(tmp_path, MODELS["gpt_oss"]())
    else:
        write(tmp_path, packed_models.with_experts(), FORMATS[name])
    made = CpuExecutor(WorkerConfig(model=str(tmp_path), load_format="dummy", threads=1, num_blocks=64))
    harness = StepHarness(made)
    running = harness.admit(PROMPTS[0])
    harness.run(2, chunk=9)
    assert len(running.output) >= 2


@pytest.mark.parametrize(
    ("name", "left_out", "setting"),
    [
        ("fp8-blocks", r"model\.layers\.1\..*", {"modules_to_not_convert": ["model.layers.1"]}),
        ("fp8-tensor", r".*k_proj\.weight", {"ignored_layers": ["k_proj"]}),
        ("compressed-w4a16", r".*(q|down)_proj\.weight", {"ignore": ["re:.*q_proj", "re:.*down_proj", "lm_head"]}),
        ("gptq", r".*layers\.0\..*up_proj\.weight", {"dynamic": {r"-:model\.layers\.0\..*up_proj": {}}}),
        (
            "auto-round",
            r".*layers\.1\.mlp\.(gate|down)_proj\.weight",
            {"extra_config": {f"model.layers.1.mlp.{one}_proj": {"bits": 16} for one in ("gate", "down")}},
        ),
        ("modelopt-nvfp4", r".*layers\.2\..*", {"ignore": ["lm_head", "model.layers.2*"]}),
    ],
)
def test_linears_that_a_format_leaves_out_are_as_usual(
    name: str, left_out: str, setting: dict[str, object], tmp_path: Path
) -> None:
    form = FORMATS[name]
    oracle = write(tmp_path, packed_models.dense(), form, left_out)
    with pytest.raises(InvalidRequest, match=r"if the checkpoint leaves|no file holds|by config\.json it must"):
        load_model(str(tmp_path), "auto", torch.float32)
    change_config(tmp_path, quantization_config={**form.settings, **setting})
    check_tokens(tmp_path, oracle)


# How a checkpoint says that its head is packed.
HEADS = {
    "compressed-fp8-channel": {"ignore": []},
    "compressed-w4a16-zeros": {"ignore": []},
    "compressed-nvfp4": {"ignore": []},
    "gptq-zeros": {"lm_head": True},
    "auto-round": {"extra_config": {"lm_head": {"bits": 4}}},
    "modelopt-fp8": {"ignore": []},
}


@pytest.mark.parametrize("name", HEADS)
def test_a_packed_head_has_the_tokens_of_its_dequantized_weights(name: str, tmp_path: Path) -> None:
    form = FORMATS[name]
    oracle = write(tmp_path, packed_models.dense(), form, heads=True)
    without = {"ignore": ["lm_head"], "lm_head": False, "extra_config": {}}
    change_config(tmp_path, quantization_config={**form.settings, **{key: without[key] for key in HEADS[name]}})
    with pytest.raises(InvalidRequest, match=r"lm_head\.weight"):
        load_model(str(tmp_path), "auto", torch.float32)
    change_config(tmp_path, quantization_config={**form.settings, **HEADS[name]})
    made = check_tokens(tmp_path, oracle)
    assert made.facts.weight_bytes == weight_bytes(load_config(tmp_path), torch.float32)


def with_targets(name: str, *targets: str, **settings: Any) -> dict[str, Any]:
    """Returns a config of compressed-tensors for these modules."""
    group = {**FORMATS[name].settings["config_groups"]["group_0"], "targets": list(targets)}
    return {**FORMATS[name].settings, "config_groups": {"group_0": group}, "ignore": [], **settings}


TABLES = ["compressed-fp8-channel", "compressed-w4a16-zeros", "compressed-w4a16-order", "compressed-nvfp4"]


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("tied", [False, True])
def test_a_packed_embedding_has_the_tokens_of_its_dequantized_weights(name: str, tied: bool, tmp_path: Path) -> None:
    oracle = write(tmp_path, packed_models.dense(tied=tied), FORMATS[name], heads=True, tables=True)
    targets = ("Linear", "Embedding") if tied else ("Linear", "model.embed_tokens")
    change_config(tmp_path, quantization_config=with_targets(name, *targets))
    made = check_tokens(tmp_path, oracle)
    assert made.facts.weight_bytes == weight_bytes(load_config(tmp_path), torch.float32)
    weights = load_model(str(tmp_path), "auto", torch.float32).weights
    assert isinstance(weights.embed, PackedTable)
    assert (weights.lm_head.params["weight"] is weights.embed.params["weight"]) == tied
    ids = torch.tensor([VOCAB_SIZE - 1, 0, 77, 0])
    assert torch.equal(take(weights.embed, ids, torch.float32), oracle.get_input_embeddings().weight[ids])


@pytest.mark.parametrize("setting", [{"ignore": ["model.embed_tokens"]}, {"targets": ["Linear"]}])
def test_an_embedding_that_the_format_leaves_out_is_as_usual(setting: dict[str, Any], tmp_path: Path) -> None:
    name = "compressed-fp8-channel"
    oracle = write(tmp_path, packed_models.dense(), FORMATS[name])
    targets = setting.get("targets", ["Linear", "Embedding"])
    ignored = ["lm_head", *setting.get("ignore", [])]
    change_config(tmp_path, quantization_config=with_targets(name, *targets, ignore=ignored))
    check_tokens(tmp_path, oracle)
    assert isinstance(load_model(str(tmp_path), "auto", torch.float32).weights.embed, torch.Tensor)


@pytest.mark.parametrize("name", ["fp8-blocks-across-parts", "compressed-mxfp4", "gptq-order"])
@pytest.mark.parametrize("make", [packed_models.dense, packed_models.with_experts])
def test_a_start_refuses_products_that_are_not_those_of_the_dequantized_weights(
    name: str, make: Callable[[], PreTrainedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, make(), FORMATS[name])
    right = PackedOps.multiply

    def wrong(ops: PackedOps, params: Params, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        product = right(ops, params, x, out)
        product[:, 3] *= 2
        return product

    monkeypatch.setattr(PackedOps, "multiply", wrong)
    with pytest.raises(InvalidRequest, match=r"differs from that of the dequantized weights by .* at most 0\.0001"):
        executor(tmp_path)


def test_a_start_refuses_an_embedding_that_is_not_the_dequantized_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, packed_models.dense(), FORMATS["compressed-w4a16"], tables=True)
    settings = with_targets("compressed-w4a16", "Linear", "Embedding", ignore=["lm_head"])
    change_config(tmp_path, quantization_config=settings)
    executor(tmp_path)
    monkeypatch.setattr(CpuDevice, "taken", lambda device, table, ids: take(table, ids // 2, device.dtype))
    with pytest.raises(InvalidRequest, match=r"an embedding in packed integers, .* differs from that of the deq"):
        executor(tmp_path)


def test_a_start_refuses_weights_that_are_not_numbers(tmp_path: Path) -> None:
    write(tmp_path, packed_models.dense(), FORMATS["fp8-blocks"])
    tensors = load_file(tmp_path / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.dtype is torch.float8_e4m3fn:
            tensors[name].view(torch.uint8)[1, 2] = 0x7F
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(InvalidRequest, match=r"gate_proj\.weight holds 1 values that are not numbers"):
        executor(tmp_path)
