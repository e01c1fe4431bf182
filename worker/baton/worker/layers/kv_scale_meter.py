"""Sets the scales of quantized KV while steps run: a layer's, just before it writes, from all that it has written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from baton.worker.layers.spec import AttentionSpec

E4M3_MAX = 448.0
# Larger values than those seen still fit. This costs a floating-point number no precision.
HEADROOM = 2.0

Write = Callable[[Tensor, Tensor, Tensor], None]  # writes the K and V of these projections into a cache at slots


class Staging(NamedTuple):
    """What a cache of 16 bits for the tokens of one step is made of, which a layer's kernel writes before it is known
    how large its keys and values are."""

    attention: AttentionSpec
    block_size: int
    num_tokens: int  # at most, of a step
    dtype: torch.dtype

    def blocks(self, device: torch.device) -> Tensor:
        """Returns the cache."""
        spec = self.attention
        num_blocks = -(-self.num_tokens // self.block_size)
        shape = (num_blocks, 2, spec.num_kv_heads, self.block_size, spec.head_dim)
        return torch.zeros(shape, dtype=self.dtype, device=device)


class KvScaleMeter:
    """Measures the steps' keys and values. Never waits for the device."""

    def __init__(self, kv_scales: Sequence[Tensor], staging: Staging | None = None) -> None:
        """`staging`: for layers that `measure`."""
        device = kv_scales[0].device
        self._kv_scales = kv_scales  # [2, num_kv_heads] fp32 of each layer
        self._largest = torch.zeros(len(kv_scales), 2, dtype=torch.float32, device=device)
        if staging is not None:
            self._cache = staging.blocks(device)
            self._slots = torch.arange(staging.num_tokens, dtype=torch.int32, device=device)

    def measure(self, layer: int, qkv: Tensor, write: Write) -> None:
        """Sets the scales of a layer that is about to write the keys and values of `qkv`, which stays as it is."""
        self._cache.zero_()
        write(qkv.clone(), self._cache, self._slots[: len(qkv)])
        self.observe(layer, self._cache)

    def observe(self, layer: int, keys_values: Tensor) -> None:
        """Sets the scales of a layer that is about to write these keys and values [n, 2, num_kv_heads, ...]."""
        largest = self._largest[layer]
        found = keys_values.abs().transpose(0, 1).flatten(1).amax(1).float()
        torch.maximum(largest, found, out=largest)
        self._kv_scales[layer].copy_(scales_for(largest)[:, None])

    def scales(self) -> Tensor:
        """Returns the scales [num_layers, 2] on the host, and waits for the device."""
        return torch.stack([scale[:, 0] for scale in self._kv_scales]).cpu()


def scales_for(largest: Tensor) -> Tensor:
    """Returns powers of two by which values as large as these, with headroom, fit; 1 for none and for infinite ones.

    Powers of two are the same on every card, though its sums are rounded otherwise.
    """
    _, exponent = torch.frexp(largest * (HEADROOM / E4M3_MAX))
    usable = (largest > 0) & torch.isfinite(largest)
    return torch.where(usable, torch.ldexp(torch.ones_like(largest), exponent), torch.ones_like(largest))
