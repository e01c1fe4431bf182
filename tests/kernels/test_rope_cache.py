"""The fused q/k norm, RoPE and KV write against the reference in float32."""

from __future__ import annotations

import pytest
import torch
from kernel_harness import BOUNDS, GRID, SMALL, Shape, cases, poisoned, relative_error

from baton.kernels import reference
from baton.kernels.rope_cache import rope_and_cache

MAX_POSITION = 512


@pytest.mark.parametrize(("shape", "device"), cases(SMALL, GRID))
@pytest.mark.parametrize("normed", [False, True])
def test_queries_keys_and_values_arrive_where_the_oracle_puts_them(shape: Shape, device: str, normed: bool) -> None:
    for num_tokens in (1, 5) if device == "cpu" else (1, shape.block_size, 1000):
        num_q_heads, num_blocks = shape.group * shape.num_kv_heads, 2 + num_tokens // shape.block_size
        width = (num_q_heads + 2 * shape.num_kv_heads) * shape.head_dim
        qkv = torch.randn(num_tokens, width, device=device).to(shape.dtype)
        positions = torch.randint(MAX_POSITION, (num_tokens,), dtype=torch.int32, device=device)
        slots = torch.randperm(num_blocks * shape.block_size, device=device)[:num_tokens].int()
        slots[num_tokens // 2 + 1 :: 3] = -1
        cos_sin = torch.randn(MAX_POSITION, shape.head_dim, device=device)
        weights = {
            name: (torch.rand(shape.head_dim, device=device) + 0.5).to(shape.dtype)
            for name in (("q_norm", "k_norm") if normed else ())
        }
        size = (num_blocks, 2, shape.num_kv_heads, shape.block_size, shape.head_dim)
        cache = poisoned(*size, dtype=shape.dtype, device=device)
        expected_cache, expected = cache.float(), qkv.float()
        reference.rope_and_cache(
            expected,
            expected_cache,
            positions,
            slots,
            cos_sin,
            num_q_heads,
            **{name: weight.float() for name, weight in weights.items()},
        )
        before = qkv.clone()
        rope_and_cache(qkv, cache, positions, slots, cos_sin, num_q_heads, **weights)
        cut = num_q_heads * shape.head_dim
        assert relative_error(qkv[:, :cut], expected[:, :cut]) <= BOUNDS[shape.dtype]
        assert torch.equal(qkv[:, cut:], before[:, cut:])
        untouched = expected_cache.isnan()
        assert torch.equal(cache.isnan(), untouched)
        assert relative_error(cache[~untouched], expected_cache[~untouched]) <= BOUNDS[shape.dtype]
