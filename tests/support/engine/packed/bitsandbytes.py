"""Packs matrices as bitsandbytes does, with the tables and states of tensors that it has written itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from support.engine.packed.weights import Format, Packed
from torch import Tensor

_PATH = Path(__file__).parents[3] / "worker" / "quantization" / "bitsandbytes.safetensors"
WRITTEN = load_file(_PATH)  # `quantize_4bit` and `int8_vectorwise_quant` of bitsandbytes 0.50.2
_BLOCK, _MOST = 64, 127


def four(kind: str, *, nested: bool) -> dict[str, Any]:
    """Returns the quantization_config of 4 bits."""
    settings = {"load_in_4bit": True, "bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": nested}
    return {"quant_method": "bitsandbytes", **settings, "bnb_4bit_quant_storage": "uint8"}


def pack_four(kind: str) -> Callable[[Tensor], Packed]:
    """Packs with a scale for each 64 values."""

    def pack(weight: Tensor) -> Packed:
        table, state = WRITTEN[f"{kind}.weight.quant_map"], f"weight.quant_state.bitsandbytes__{kind}"
        blocks = weight.numpy().reshape(-1, _BLOCK)
        scales = np.abs(blocks).max(1)
        codes = np.abs((blocks / scales[:, None])[..., None] - table.numpy()).argmin(-1)
        flat = codes.reshape(-1, 2)
        tensors = {
            ".weight": torch.from_numpy((flat[:, :1] << 4 | flat[:, 1:]).astype(np.uint8)),
            ".weight.absmax": torch.from_numpy(scales),
            ".weight.quant_map": table.clone(),
            f".{state}": WRITTEN[f"{kind}.{state}"].clone(),
        }
        meant = (table.numpy()[codes] * scales[:, None]).astype(np.float32).reshape(weight.shape)
        return Packed(tensors, torch.from_numpy(meant))

    return pack


def pack_int8(weight: Tensor) -> Packed:
    """Packs with the largest magnitude of each row."""
    largest = weight.abs().amax(1)
    stored = (weight / largest[:, None] * _MOST).round().to(torch.int8)
    return Packed({".weight": stored, ".SCB": largest}, stored.float() * (largest / _MOST)[:, None])


FORMATS: Mapping[str, Format] = {
    "bitsandbytes-nf4": Format(pack_four("nf4"), four("nf4", nested=False)),
    "bitsandbytes-fp4": Format(pack_four("fp4"), four("fp4", nested=False)),
    "bitsandbytes-int8": Format(pack_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
}
