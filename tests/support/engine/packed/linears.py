"""Packed linears of random weights, read as checkpoints are, and the weights that they mean."""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

import torch
from support.engine.packed import bitsandbytes
from support.engine.packed.models import FORMATS
from torch import Tensor

from baton.worker.quantization.base import LinearShape, Params, Part, QuantMethod
from baton.worker.quantization.formats.table import FORMATS as ROWS

_FORMATS = {**FORMATS, **bitsandbytes.FORMATS}


class PackedLinear(NamedTuple):
    """A linear, and what it means."""

    method: QuantMethod
    params: Params
    weight: Tensor  # [out, in] fp32
    bias: Tensor  # [out]


def packed_linear(
    name: str,
    rows: tuple[int, ...],
    columns: int,
    dtype: torch.dtype,
    device: str,
    *,
    of_experts: bool = False,
    **more: Any,
) -> PackedLinear:
    """Returns a linear of parts with so many rows in a format of `models` or `bitsandbytes`. `of_experts`: as gates and
    ups are; `more`: of its settings."""
    shape = LinearShape([Part(f"part{index}", each) for index, each in enumerate(rows)], columns, bias=True)
    settings = {**_FORMATS[name].settings, **more}
    module = import_module(f"baton.worker.quantization.formats.{ROWS[settings['quant_method']].module}")
    form = module.FORMAT(settings)
    method = form.gates_method_of(shape) if of_experts and len(rows) > 1 else form.method_of(shape)
    tensors: dict[str, Tensor] = {}
    weights = []
    for part in shape.parts:
        packed = _FORMATS[name].pack(torch.randn(part.rows, columns) * 0.1)
        tensors |= {part.name + ending: one for ending, one in packed.tensors.items()}
        tensors[f"{part.name}.bias"] = torch.randn(part.rows).to(dtype)
        weights.append(packed.weight)
    params = method.create(shape, dtype, torch.device(device))

    def source(wanted: str, size: tuple[int, ...], into: Tensor) -> None:
        found = tensors[wanted if wanted in tensors else wanted.replace("_inv", "")]
        decode = form.decoder_of(wanted)
        into.copy_((found if decode is None else decode(found)).reshape(into.shape))

    if finish := method.load(params, shape, source):
        finish()
    biases = torch.cat([tensors[f"{part.name}.bias"] for part in shape.parts])
    return PackedLinear(method, params, torch.cat(weights).to(device), biases.to(device))
