"""The scales of a quantized KV cache, as given in a checkpoint. Knows no kernels."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from baton.rpc.errors import InvalidRequest
from baton.worker.weights.tensors import Tensors

_SUFFIXES = (".k_scale", ".v_scale", ".kv_scale")
# Names of one tensor for keys and one for values. Each holds one number.
_NAMES = (("k_scale", "v_scale"), ("k_proj.k_scale", "v_proj.v_scale"), ("attn.k_scale", "attn.v_scale"))


def is_kv_scale(name: str) -> bool:
    """Returns whether the tensor of this name is a KV scale."""
    return name.endswith(_SUFFIXES)


def unit_scales(num_layers: int) -> Tensor:
    """Returns ones, [num_layers, 2], for a checkpoint without scales."""
    return torch.ones(num_layers, 2, dtype=torch.float32)


def load_kv_scales(checkpoint: Tensors, num_layers: int) -> Tensor:
    """Reads the scales of keys and values, [num_layers, 2] fp32 on the host. Missing scales are 1.

    Those that are not one number are NaN.
    """
    scales = unit_scales(num_layers)
    present = {name for name in checkpoint.names if is_kv_scale(name)}
    for layer in range(num_layers) if present else ():
        prefix = f"model.layers.{layer}.self_attn."
        for pair in (*_NAMES, ("kv_scale", "kv_scale")):
            names = [prefix + name for name in pair]
            if present.issuperset(names):
                scales[layer] = torch.tensor([_number(checkpoint, name) for name in names])
                break
    return scales


def check_kv_scales(scales: Tensor) -> None:
    """Raises InvalidRequest for scales of a checkpoint, [num_layers, 2], by which nothing can be divided."""
    wrong = ~(torch.isfinite(scales) & (scales > 0))
    for layer in wrong.any(1).nonzero().flatten().tolist():
        keys, values = scales[layer].tolist()
        raise InvalidRequest(
            f"the checkpoint's scales of layer {layer}'s KV are {keys} of keys and {values} of values; each must be "
            "one number above 0. Give calculate_kv_scales=true, which computes them, or kv_cache_dtype=auto",
            field="kv_cache_dtype",
        )


def _number(checkpoint: Tensors, name: str) -> float:
    """Returns a tensor's number; NaN if it has several, which differ, or none."""
    values = checkpoint.tensor(name, checkpoint.entry(name).shape).reshape(-1)
    return float(values[0]) if len(values) and bool((values == values[0]).all()) else math.nan
