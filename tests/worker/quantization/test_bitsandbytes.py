"""Weights of bitsandbytes mean what its own dequantization says, and stay packed.

`bitsandbytes.safetensors` was written by bitsandbytes 0.50.2 (`quantize_4bit`, `int8_vectorwise_quant`). NAME.meant has
every fourth row of what its `dequantize_4bit` and `int8_vectorwise_dequant` return.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engine.packed.bitsandbytes import FORMATS, WRITTEN, four
from support.engine.packed.models import write
from support.engine.random_vectors import with_random_vectors
from support.engine.step_harness import StepHarness
from support.engine.tiny_models import generate_greedily, prompts
from support.engine.tiny_shape import SHAPE
from torch import Tensor
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from baton.rpc.errors import InvalidRequest
from baton.worker.config import WorkerConfig
from baton.worker.executors.cpu.executor import CpuExecutor
from baton.worker.models.registry import load_config
from baton.worker.quantization.base import LinearShape, Part
from baton.worker.quantization.formats.bitsandbytes import BitsAndBytes
from baton.worker.quantization.quantized.method import PackedMethod
from baton.worker.weights.build import weight_bytes
from baton.worker.weights.loading import load_model

STATE = "weight.quant_state.bitsandbytes__nf4"
INT8 = {"quant_method": "bitsandbytes", "load_in_8bit": True}
SIZES = {"nf4": (24, 128), "fp4": (24, 128), "nf4-nested": (33, 512), "int8": (24, 128)}
COUNT = 10
PROMPTS = prompts(2, 20)


SETTINGS = {
    "nf4": four("nf4", nested=False),
    "fp4": four("fp4", nested=False),
    "nf4-nested": four("nf4", nested=True),
    "int8": INT8,
}


def same(_: str, tensor: Tensor) -> Tensor:
    return tensor


def dequantized(name: str, change: Callable[[str, Tensor], Tensor] = same) -> Tensor:
    rows, columns = SIZES[name]
    made = BitsAndBytes(SETTINGS[name])
    shape = LinearShape([Part(name, rows)], columns)
    method = made.method_of(shape)
    assert isinstance(method, PackedMethod)
    params = method.create(shape, torch.float32, torch.device("cpu"))

    def source(wanted: str, size: tuple[int, ...], into: Tensor) -> None:
        found, decode = change(wanted, WRITTEN[wanted]), made.decoder_of(wanted)
        into.copy_((found.reshape(size) if decode is None else decode(found)).view(into.shape))

    method.load(params, shape, source)()
    return method.dequantized(params, slice(0, rows))


@pytest.mark.parametrize("name", SETTINGS)
def test_a_weight_is_what_bitsandbytes_dequantizes(name: str) -> None:
    torch.testing.assert_close(dequantized(name)[::4], WRITTEN[f"{name}.meant"].float(), rtol=1e-6, atol=1e-9)


def state(**values: Any) -> Tensor:
    written = json.loads(bytes(WRITTEN[f"nf4-nested.{STATE}"].tolist()))
    return torch.tensor(list(json.dumps({**written, **values}).encode()), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("ending", "value", "wrong"),
    [
        (STATE, state(blocksize=128), "blocksize is 128; it must be 64"),
        (STATE, state(nested_blocksize=64), "nested_blocksize is 64; it must be 256"),
        (STATE, state(nested_offset=None), "is no state of bitsandbytes"),
        (STATE, torch.tensor([1, 2], dtype=torch.uint8), "is no state of bitsandbytes"),
        (STATE, state(quant_type="fp4"), "quant_type is 'fp4'; it must be nf4"),
        ("weight.nested_absmax", torch.tensor([1.0, torch.inf]), r"nf4-nested\.weight\.absmax holds 8 values that are"),
    ],
)
def test_tensors_that_cannot_be_right_are_refused(ending: str, value: Tensor, wrong: str) -> None:
    with pytest.raises(InvalidRequest, match=wrong):
        dequantized("nf4-nested", lambda name, tensor: value if name.endswith(ending) else tensor)


def model() -> PreTrainedModel:
    return with_random_vectors(lambda: Qwen2ForCausalLM(Qwen2Config(**{**SHAPE, "intermediate_size": 128})), seed=3)


def test_a_model_has_the_tokens_of_its_dequantized_weights(tmp_path: Path) -> None:
    oracle = write(tmp_path, model(), FORMATS["bitsandbytes-nf4"])
    made = CpuExecutor(WorkerConfig(model=str(tmp_path), threads=1, num_blocks=64))
    harness = StepHarness(made)
    running = [harness.admit(prompt) for prompt in PROMPTS]
    harness.run(COUNT, chunk=9)
    assert [one.output[:COUNT] for one in running] == [generate_greedily(oracle, each, COUNT) for each in PROMPTS]
    assert made.facts.weight_bytes == weight_bytes(load_config(tmp_path), torch.float32)
    assert made.facts.weight_format == "bitsandbytes nf4"
    load_model(str(tmp_path), "dummy", torch.float32)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[f"model.layers.1.mlp.down_proj.{STATE}"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(
        InvalidRequest, match=r"no file holds the tensor model\.layers\.1\.mlp\.down_proj\.weight\.quant"
    ):
        load_model(str(tmp_path), "auto", torch.float32)


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"load_in_4bit": False}, "load_in_4bit is False and load_in_8bit is False; one must be true"),
        ({"bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage is 'bfloat16'; it must be one of uint8"),
        ({"bnb_4bit_quant_type": "int4"}, "bnb_4bit_quant_type is 'int4'; it must be one of nf4, fp4"),
    ],
)
def test_settings_that_are_not_supported_are_refused(change: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        BitsAndBytes({**SETTINGS["nf4"], **change})


def test_rows_that_blocks_do_not_divide_are_refused() -> None:
    shape = LinearShape([Part("layers.0.down", 8)], 96)
    with pytest.raises(InvalidRequest, match=r"layers\.0\.down: 96 input features are no multiple of the 64"):
        BitsAndBytes(SETTINGS["nf4"]).method_of(shape).create(shape, torch.float32, torch.device("cpu"))


def test_heads_are_left_out_unless_the_config_lists_others() -> None:
    head = LinearShape([Part("lm_head", 8)], 64, kind="head")
    assert BitsAndBytes(INT8).method_of(head).name == "unquantized"
    assert BitsAndBytes({**INT8, "llm_int8_skip_modules": ["gate"]}).method_of(head).name == "bitsandbytes int8"
