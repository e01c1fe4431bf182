"""The scales of a quantized KV cache, as given in a checkpoint. Knows no kernels."""

from __future__ import annotations

import torch
from torch import Tensor

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
    """Reads the scales of keys and values, [num_layers, 2] fp32 on the host. Missing scales are 1."""
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


def _number(checkpoint: Tensors, name: str) -> float:
    return float(checkpoint.tensor(name, checkpoint.entry(name).shape).reshape(-1)[0])
