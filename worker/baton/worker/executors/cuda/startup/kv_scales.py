"""The scales of quantized KV, from a checkpoint."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.rpc.errors import Mismatch
from baton.worker.executors.cuda.startup.support import dtype_name
from baton.worker.kv_spec import KvSpec
from baton.worker.models.config import ModelConfig
from baton.worker.models.kv_groups import kv_spec_of
from baton.worker.weights.loading import LoadedModel


def scaled_kv_spec(config: ModelConfig, loaded: LoadedModel, block_size: int, dtype: torch.dtype) -> KvSpec:
    """Returns the spec of blocks of this dtype. It has scales if they are not all 1."""
    scaled = dtype == torch.float8_e4m3fn and bool((loaded.kv_scales != 1).any())
    kv_scales = tuple(loaded.kv_scales.flatten().tolist()) if scaled else ()
    return kv_spec_of(config, loaded.digest, block_size, dtype_name(dtype), kv_scales)


def check_same_scales(spec: KvSpec, loaded: LoadedModel, dtype: torch.dtype, source: str) -> None:
    """Raises Mismatch for weights that scale quantized KV otherwise than the blocks of a spec."""
    if scaled_kv_spec(loaded.config, loaded, spec.block_size, dtype).groups != spec.groups:
        raise Mismatch(
            f"model={source!r} scales its quantized KV in another way: such weights need a restart", field="model"
        )


def kv_scales_of(loaded: LoadedModel, device: torch.device) -> Tensor:
    """Returns scales [num_layers, 2, num_kv_heads]. The checkpoint has one per tensor."""
    scales = loaded.kv_scales.to(device)
    return scales[:, :, None].repeat(1, 1, loaded.config.num_kv_heads)
