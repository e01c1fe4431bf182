"""Sets the scales of quantized KV while steps run: a layer's, just before it writes, from all that it has written."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from baton.worker.layers.spec import AttentionSpec

E4M3_MAX = 448.0
# Larger values than those seen still fit. This costs a floating-point number no precision.
HEADROOM = 2.0

Write = Callable[[Tensor, Tensor, Tensor], None]  # writes the K and V of these projections into a cache at slots


class KvScaleMeter:
    """Measures steps of at most `num_tokens`. Never waits for the device."""

    def __init__(
        self, spec: AttentionSpec, block_size: int, num_tokens: int, kv_scales: Sequence[Tensor], dtype: torch.dtype
    ) -> None:
        device = kv_scales[0].device
        shape = (-(-num_tokens // block_size), 2, spec.num_kv_heads, block_size, spec.head_dim)
        self._cache = torch.zeros(shape, dtype=dtype, device=device)
        self._slots = torch.arange(num_tokens, dtype=torch.int32, device=device)
        self._kv_scales = kv_scales  # [2, num_kv_heads] fp32 of each layer
        self._largest = torch.zeros(len(kv_scales), 2, dtype=torch.float32, device=device)

    def measure(self, layer: int, qkv: Tensor, write: Write) -> None:
        """Sets the scales of a layer that is about to write the keys and values of `qkv`, which stays as it is."""
        self._cache.zero_()
        write(qkv.clone(), self._cache, self._slots[: len(qkv)])
        largest = self._largest[layer]
        torch.maximum(largest, self._cache.abs().amax((0, 2, 3, 4)).float(), out=largest)
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
