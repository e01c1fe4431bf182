"""Products with packed weights stay within a bound of those with the dequantized ones; bad values are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.engine.packed.models import FORMATS
from torch import Tensor

from baton.rpc.errors import InvalidRequest
from baton.worker.config_model import WEIGHT_FORMATS
from baton.worker.layers.cpu.device import CpuKernels
from baton.worker.quantization.base import LinearShape, Params, Part, QuantMethod
from baton.worker.quantization.formats.modules import Modules
from baton.worker.quantization.formats.table import FORMATS as ROWS
from baton.worker.quantization.quantized.few_rows import FewRows

KERNELS = CpuKernels()
CPU = torch.device("cpu")


def method_for(name: str, shape: LinearShape, **more: Any) -> QuantMethod:
    from importlib import import_module

    settings = {**FORMATS[name].settings, **more}
    row = ROWS[settings["quant_method"]]
    made = import_module(f"baton.worker.quantization.formats.{row.module}").FORMAT(settings)
    return made.method_of(shape)  # type: ignore[no-any-return]


def shape_of(*rows: int, columns: int = 512, bias: bool = True) -> LinearShape:
    return LinearShape([Part(f"layers.0.part{index}", each) for index, each in enumerate(rows)], columns, bias)


def loaded(
    name: str,
    shape: LinearShape,
    dtype: torch.dtype = torch.float32,
    change: Callable[[str, Tensor], Tensor] = lambda _, tensor: tensor,
) -> tuple[QuantMethod, Params, Tensor, Tensor]:
    """Returns a linear of random weights, and the weight and bias that its tensors mean."""
    torch.manual_seed(7)
    tensors: dict[str, Tensor] = {}
    weights, biases = [], []
    for part in shape.parts:
        packed = FORMATS[name].pack(torch.randn(part.rows, shape.in_features) * 0.1)
        biases.append(torch.randn(part.rows))
        tensors |= {part.name + ending: one for ending, one in packed.tensors.items()}
        tensors[f"{part.name}.bias"] = biases[-1]
        weights.append(packed.weight)
    method = method_for(name, shape)
    params = method.create(shape, dtype, CPU)

    def source(wanted: str, size: tuple[int, ...], into: Tensor) -> None:
        found = tensors.get(wanted, tensors.get(wanted.replace("_inv", "")))
        assert found is not None, wanted
        into.copy_(change(wanted, found).reshape(size))

    finish = method.load(params, shape, source)
    assert finish is not None
    finish()
    return method, params, torch.cat(weights), torch.cat(biases)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-7)])
def test_products_stay_within_the_bound(name: str, dtype: torch.dtype, bound: float) -> None:
    shape = shape_of(96, 32, 32)
    method, params, weight, bias = loaded(name, shape, dtype)
    ops = method.on_cpu(KERNELS)
    x = torch.randn(5, shape.in_features).to(dtype)
    exact = x.double() @ weight.double().t() + bias.to(dtype).double()
    # Of what is summed: a sum near 0 has no digits of its own.
    allowed = bound * (x.double().abs() @ weight.double().abs().t() + bias.double().abs())
    out = torch.empty(5, 160, dtype=dtype)
    for product in (ops.multiply(params, x), ops.multiply(params, x, out)):
        assert product.dtype == dtype
        assert bool(((product.double() - exact).abs() <= allowed).all())


# What the kernels take. Groups of 16 columns are smaller than theirs.
AUTO_ROUND = ("auto-round", "auto-round-awq")
FEW_ROWS = {
    "compressed-int8": ["row_scale"],
    **{name: ["int4"] for name in ("compressed-w4a16", "awq", "gptq", "gptq-zeros", *AUTO_ROUND)},
}


@pytest.mark.parametrize("name", FORMATS)
def test_products_of_few_rows_in_bfloat16_stay_within_the_bound(name: str) -> None:
    shape = shape_of(96, 32, 32)
    method, params, weight, bias = loaded(name, shape, torch.bfloat16)
    assert isinstance(method, FewRows)
    ops = method.on_bfloat16(KERNELS)
    params = ops.prepared(params)
    assert [one for one in ("int4", "row_scale") if one in params] == FEW_ROWS.get(name, [])
    for num_tokens in (1, 7):
        x = torch.randn(num_tokens, shape.in_features).to(torch.bfloat16)
        exact = x.double() @ weight.double().t() + bias.to(torch.bfloat16).double()
        allowed = 2**-7 * (x.double().abs() @ weight.double().abs().t() + bias.double().abs())
        out = torch.empty(num_tokens, 160, dtype=torch.bfloat16)
        for product in (ops.multiply(params, x), ops.multiply(params, x, out)):
            assert bool(((product.double() - exact).abs() <= allowed).all())


def test_blocks_of_rows_are_dequantized_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.worker.quantization.quantized.method._BLOCK_VALUES", 4096)
    shape = shape_of(320, columns=128, bias=False)
    for name in ("fp8-blocks-across-parts", "awq", "compressed-w4a16-zeros"):
        method, params, weight, _ = loaded(name, shape)
        blocks = list(method.blocks(params))  # type: ignore[attr-defined]
        assert len(blocks) > 1
        whole = torch.cat([method.dequantized(params, rows) for rows in blocks])  # type: ignore[attr-defined]
        assert torch.equal(whole, weight)


def test_every_number_of_8_bits_has_its_value() -> None:
    shape = shape_of(1, columns=254, bias=False)
    method = method_for("compressed-fp8-channel", shape)
    params = method.create(shape, torch.float32, CPU)
    numbers = torch.tensor([byte for byte in range(256) if byte & 0x7F != 0x7F], dtype=torch.uint8)
    params["weight"].copy_(numbers.view(torch.float8_e4m3fn))
    params["scale"].fill_(1)
    found = method.dequantized(params, slice(0, 1))  # type: ignore[attr-defined]
    assert torch.equal(found[0], numbers.view(torch.float8_e4m3fn).float())


def test_packed_weights_take_their_own_bytes() -> None:
    shape = shape_of(1024, columns=1024, bias=False)
    for name, bits in {"fp8-blocks": 8.1, "awq": 5.2, "gptq-2": 4.3, "modelopt-nvfp4": 4.6}.items():
        params = method_for(name, shape).create(shape, torch.bfloat16, torch.device("meta"))
        assert sum(one.nbytes for one in params.values()) * 8 <= bits * 1024 * 1024, name


@pytest.mark.parametrize(
    ("name", "rows", "columns", "wrong"),
    [
        ("gptq", 64, 100, "100 input features are no multiple of the group size 32"),
        ("gptq-8-rows-v2", 64, 30, "30 input features are no multiple of the 4 that a word packs"),
        ("awq", 64, 100, "100 input features are no multiple of the group size 32"),
        ("awq", 60, 64, "60 output features are no multiple of the 8 that a word packs"),
        ("compressed-w4a16-zeros", 60, 64, "60 output features are no multiple of the 8"),
        ("modelopt-nvfp4", 64, 40, "40 input features are no multiple of the group size 16"),
        ("compressed-mxfp4", 64, 40, "40 input features are no multiple of the group size 32"),
    ],
)
def test_sizes_that_groups_do_not_divide_are_refused(name: str, rows: int, columns: int, wrong: str) -> None:
    shape = shape_of(rows, columns=columns)
    with pytest.raises(InvalidRequest, match=rf"layers\.0\.part0: {wrong}"):
        method_for(name, shape).create(shape, torch.float32, CPU)


@pytest.mark.parametrize(
    ("name", "ending", "value", "wrong"),
    [
        ("fp8-tensor", "_scale_inv", float("nan"), r"part1\.weight_scale_inv holds 1 values that are not finite"),
        ("compressed-fp8-channel", "_scale", float("inf"), r"part1\.weight_scale holds 1 values"),
        ("gptq", "scales", float("nan"), r"part1\.scales holds 1 values that are not finite"),
        ("awq", "scales", float("inf"), r"part1\.scales holds 1 values that are not finite"),
        ("gptq-order", "scales", float("nan"), r"part1\.scales holds 1 values that are not finite"),
        ("compressed-w4a16", "_scale", float("nan"), r"part1\.weight_scale holds 1 values that are not finite"),
        ("compressed-nvfp4", "_scale", float("nan"), r"part1\.weight_scale holds 1 values that are not finite"),
        ("gptq-order", "g_idx", -1, r"part1\.g_idx holds groups from -1 to 15; there are 16 of 32 columns"),
        (
            "gptq-order",
            "g_idx",
            15.0,
            r"part1\.g_idx holds 3\d columns of group \d+; each of the 16 .* must have 32",
        ),
        ("gptq-order", "g_idx", 16, r"part1\.g_idx holds groups from 0 to 16; there are 16 of 32 columns"),
        ("modelopt-nvfp4", "_scale_2", 0.0, r"part1\.weight_scale_2 is 0.0; it must be above 0"),
        ("compressed-mxfp4", "_scale", 255, r"part1\.weight_scale holds 1 exponents that mean NaN"),
    ],
)
def test_values_that_cannot_be_right_are_refused(name: str, ending: str, value: float, wrong: str) -> None:
    def change(wanted: str, tensor: Tensor) -> Tensor:
        if wanted.endswith((f"part1.weight{ending}", f"part1.{ending}")):
            tensor = tensor.clone()
            tensor.view(-1)[0] = value
        return tensor

    with pytest.raises(InvalidRequest, match=wrong):
        loaded(name, shape_of(64, 64), change=change)


@pytest.mark.parametrize(
    ("name", "more", "wrong"),
    [
        ("gptq", {"bits": 3}, "bits is 3; it must be one of 2, 4, 8"),
        ("gptq", {"group_size": 0}, "group_size is 0; it must be a positive integer, or -1"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'; it must be one of gptq, gptq_v2"),
        ("gptq", {"desc_act": "yes"}, "desc_act is 'yes'; it must be one of True, False"),
        ("awq", {"version": "gemv"}, "version is 'gemv'; it must be one of gemm"),
        ("awq", {"zero_point": False}, "zero_point is False; it must be one of True"),
        ("fp8-blocks", {"weight_block_size": [128]}, r"weight_block_size is \[128\]; it must be two positive integers"),
        ("fp8-blocks", {"fmt": "e5m2"}, "fmt is 'e5m2'"),
        ("fp8-blocks", {"modules_to_not_convert": "lm_head"}, "it must be a list of names"),
        ("compressed-int8", {"format": "marlin-24"}, "config_groups: group_0: format is 'marlin-24'"),
        ("compressed-int8", {"config_groups": {}}, "config_groups is missing"),
        ("compressed-int8", {"sparsity_config": {"format": "dense"}}, "sparsity_config is given"),
        (
            "auto-round",
            {"packing_format": "auto_round:marlin"},
            "packing_format is 'auto_round:marlin'; it must be one of",
        ),
        ("auto-round", {"extra_config": {"layers.0": 4}}, "layers.0 is 4; it must be an object"),
        (
            "auto-round-awq",
            {"extra_config": {"layers.0.part0": {"bits": 8}}},
            "extra_config: layers.0.part0: bits is 8; in auto_round:auto_awq it must be as of all",
        ),
        ("modelopt-fp8", {"quant_algo": "W4A8_AWQ"}, "quant_algo is 'W4A8_AWQ'; it must be one of FP8, NVFP4"),
    ],
)
def test_settings_that_are_not_supported_are_refused(name: str, more: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        method_for(name, shape_of(64), **more)


def test_routers_and_heads_stay_as_they_are_unless_the_format_has_them() -> None:
    head = replace(shape_of(64), kind="head")
    assert method_for("fp8-blocks", head).name == method_for("gptq", head).name == "unquantized"
    assert method_for("gptq", head, lm_head=True).name == "gptq, 4 bits, groups of 32"
    assert method_for("gptq", replace(head, kind="router"), lm_head=True).name == "unquantized"
    named = replace(head, parts=[Part("lm_head", 64)])
    assert method_for("auto-round", named).name == "unquantized"
    eight = method_for("auto-round", named, extra_config={"lm_head": {"bits": 8, "group_size": 64}})
    assert eight.name == "gptq, 8 bits, groups of 64"


@pytest.mark.parametrize(
    ("pattern", "has", "lacks"),
    [
        ("lm_head", "lm_head", "model.layers.0.mlp.up_proj"),
        ("gate", "model.layers.0.mlp.gate", "model.layers.0.mlp.gate_proj"),
        ("model.layers.1", "model.layers.1.mlp.up_proj", "model.layers.11.mlp.up_proj"),
        ("model.language_model.layers.1", "model.layers.1.mlp.up_proj", "model.layers.2.mlp.up_proj"),
        ("language_model.model.layers.1.mlp", "model.layers.1.mlp.up_proj", "model.layers.1.self_attn.o_proj"),
        ("*.mlp.gate", "model.layers.0.mlp.gate", "model.layers.0.mlp.gate_proj"),
        ("re:.*self_attn.*", "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj"),
        (r"re:language_model\.model\.layers\.0", "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"),
    ],
)
def test_modules_are_named_as_checkpoints_name_them(pattern: str, has: str, lacks: str) -> None:
    modules = Modules(["model.visual", pattern])
    assert modules.has(has)
    assert not modules.has(lacks)


def test_the_settings_name_every_format():
    assert tuple(ROWS) == WEIGHT_FORMATS
