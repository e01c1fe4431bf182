"""Blocks of GGUF are dequantized as the package gguf does, and a file's stay packed."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from support.engine.step_harness import StepHarness
from support.engine.tiny_models import generate_greedily, prompts
from support.engine.tiny_shape import SHAPE
from support.gguf.files import write_gguf
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from baton.rpc.errors import InvalidRequest
from baton.worker.config import WorkerConfig
from baton.worker.executors.cpu.executor import CpuExecutor
from baton.worker.layers.cpu.device import CpuKernels
from baton.worker.layers.table import PackedTable
from baton.worker.quantization.base import LinearShape, Part
from baton.worker.quantization.formats.gguf import Gguf
from baton.worker.quantization.quantized.few_rows import FewRows
from baton.worker.quantization.quantized.gguf import GgufBlocks
from baton.worker.quantization.quantized.gguf_blocks import BLOCK_TYPES
from baton.worker.quantization.quantized.gguf_planes import GgufPlanes
from baton.worker.weights.loading import ModelOptions, load_model, read_config

COUNT = 8
PROMPTS = prompts(2, 12)


def model() -> LlamaForCausalLM:
    torch.manual_seed(5)
    wide = {**SHAPE, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 8}
    return LlamaForCausalLM(LlamaConfig(**wide)).eval()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_a_block_means_what_the_package_says(name: str) -> None:
    kind = BLOCK_TYPES[name]
    assert gguf.GGML_QUANT_SIZES[Kind[name]] == (kind.num_values, kind.num_bytes)
    blocks = np.random.default_rng(1).integers(0, 256, (300, kind.num_bytes), dtype=np.uint8)
    with np.errstate(invalid="ignore", over="ignore"):
        expected = gguf.quants.dequantize(blocks, Kind[name])
    blocks, expected = blocks[np.isfinite(expected).all(1)], expected[np.isfinite(expected).all(1)]
    assert len(blocks) > 200
    found = kind.dequantize(torch.from_numpy(blocks))
    torch.testing.assert_close(found, torch.from_numpy(expected), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q4_K"])
def test_a_product_of_few_rows_in_bfloat16_is_that_of_the_dequantized_weight(name: str) -> None:
    kind = BLOCK_TYPES[name]
    shape = LinearShape([Part("layers.0.down", 48)], 512)
    method = Gguf({"tensors": {"layers.0.down": name}}).method_of(shape)
    assert isinstance(method, FewRows)
    params = method.create(shape, torch.bfloat16, torch.device("cpu"))
    blocks = torch.randint(0, 256, (48 * 512 // kind.num_values, kind.num_bytes), dtype=torch.uint8)
    blocks[:, :4] = torch.tensor([0.02, 0.01]).half().view(torch.uint8)
    params["weight"].copy_(blocks.view(48, -1))
    expected = torch.from_numpy(gguf.quants.dequantize(params["weight"].numpy(), Kind[name])).double()
    ops = method.on_bfloat16(CpuKernels())
    prepared = ops.prepared(params)
    assert "int4" in prepared
    x = torch.randn(3, 512).bfloat16()
    error = (ops.multiply(prepared, x).double() - x.double() @ expected.t()).abs()
    assert bool((error <= 2**-7 * (x.double().abs() @ expected.abs().t())).all())


@pytest.mark.parametrize(("kind", "bits"), [(Kind.Q4_K, 4.5), (Kind.Q6_K, 6.5625), (Kind.Q8_0, 8.5)])
def test_a_file_stays_packed_and_has_the_tokens_of_transformers(kind: Kind, bits: float, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", model(), kind)
    made = CpuExecutor(WorkerConfig(model=str(path), threads=1, num_blocks=64))
    harness = StepHarness(made)
    running = [harness.admit(prompt) for prompt in PROMPTS]
    harness.run(COUNT, chunk=9)
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32).eval()
    assert [one.output[:COUNT] for one in running] == [generate_greedily(oracle, each, COUNT) for each in PROMPTS]
    assert made.facts.weight_format == f"gguf {kind.name}"
    weights = load_model(str(path), "auto", torch.float32).weights
    assert isinstance(weights.embed, PackedTable)
    assert isinstance(weights.lm_head.method, GgufBlocks)
    layer = weights.layers[0]
    for linear in (layer.attention.qkv, layer.mlp.gate_up, layer.mlp.down):
        (packed,) = linear.params.values()
        values = packed.shape[0] * 256
        assert packed.nbytes * 8 == bits * values


def test_whether_weights_are_packed_does_not_change_the_digest(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", model(), Kind.Q4_0)
    packed, not_packed = (
        load_model(str(path), "auto", torch.float32, options=ModelOptions(packs_gguf=packs)) for packs in (True, False)
    )
    assert packed.digest == not_packed.digest
    assert packed.weights.num_bytes < not_packed.weights.num_bytes / 2


def test_a_file_can_be_rounded_to_fp8_instead(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", model(), Kind.F16)
    config = read_config(str(path), "auto", ModelOptions(quantization="fp8"))
    assert config.weight_format is not None
    assert config.weight_format.online


def test_settings_without_types_are_refused() -> None:
    with pytest.raises(ValueError, match="tensors is missing"):
        Gguf({"quant_method": "gguf"})


def test_rows_that_blocks_do_not_divide_are_refused() -> None:
    shape = LinearShape([Part("layers.0.down", 8)], 96)
    with pytest.raises(
        InvalidRequest, match=r"layers\.0\.down: 96 input features are no multiple of the 256 of a block"
    ):
        Gguf({"tensors": {"layers.0.down": "Q4_K"}}).method_of(shape).create(shape, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(("name", "at"), [(name, at) for name, kind in BLOCK_TYPES.items() for at in kind.halves])
def test_scales_that_are_not_finite_are_refused_by_name(name: str, at: int) -> None:
    kind = BLOCK_TYPES[name]
    shape = LinearShape([Part("layers.0.up", 4), Part("layers.0.down", 4)], 512)
    blocks = torch.zeros(8, 512 // kind.num_values, kind.num_bytes, dtype=torch.uint8)
    blocks[6, 1, at : at + 2] = torch.tensor([float("inf")]).half().view(torch.uint8)
    parts = {"layers.0.up.weight": blocks[:4].flatten(1), "layers.0.down.weight": blocks[4:].flatten(1)}
    for method in (GgufBlocks(name, kind), GgufPlanes(name, kind)):
        params = method.create(shape, torch.float32, torch.device("cpu"))
        finish = method.load(params, shape, lambda wanted, size, into: into.copy_(parts[wanted]))
        with pytest.raises(InvalidRequest, match=r"layers\.0\.down\.weight holds 1 blocks whose .* in row 2: the file"):
            finish()
