"""The groups of a model's KV cache. All architectures keep every token in all layers, also in layers with windows."""

from __future__ import annotations

from baton.worker.kv_spec import KvSpec, full_spec
from baton.worker.models.config import ModelConfig


def kv_spec_of(
    config: ModelConfig, digest: bytes, block_size: int, dtype: str, kv_scales: tuple[float, ...] = ()
) -> KvSpec:
    """Returns the KV spec of a model on one rank. `dtype` is the cache's."""
    return full_spec(
        digest,
        dtype,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=block_size,
        kv_scales=kv_scales,
    )
