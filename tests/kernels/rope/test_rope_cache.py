"""The fused q/k norm, RoPE and KV write against the reference in float32."""

from __future__ import annotations

import pytest
import torch
from support.kernels.harness import BOUNDS, FP8, GRID, SMALL, Shape, cases, poisoned, random_kv_scale, relative_error

from baton.kernels import reference
from baton.kernels.reference.rope import rope_cache as oracle
from baton.kernels.rope.rope_cache import rope_and_cache, rope_in_place
from baton.worker.layers.rope import cos_sin_table
from baton.worker.layers.rope_config import RopeConfig

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


@pytest.mark.parametrize(("shape", "device"), cases(SMALL[:2], GRID[:3]))
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("partial", [False, True])
def test_pairs_of_neighbours_and_parts_of_heads_rotate(
    shape: Shape, device: str, partial: bool, interleaved: bool
) -> None:
    num_tokens, num_q_heads, head_dim = 5, shape.group * shape.num_kv_heads, shape.head_dim
    rotary_dim = head_dim // 4 * 2 if partial else 0
    qkv = torch.randn(num_tokens, (num_q_heads + 2 * shape.num_kv_heads) * head_dim, device=device).to(shape.dtype)
    norms = [(torch.rand(head_dim, device=device) + 0.5).to(shape.dtype) for _ in range(2)]
    positions, slots = (torch.randperm(16, dtype=torch.int32, device=device)[:num_tokens] for _ in range(2))
    cos_sin = cos_sin_table(RopeConfig("default", 100.0, rotary_dim=rotary_dim), head_dim, 16).to(device)
    cache = torch.zeros(1, 2, shape.num_kv_heads, 16, head_dim, dtype=shape.dtype, device=device)
    expected, expected_cache = qkv.float(), cache.float()
    layout = {"rotary_dim": rotary_dim, "interleaved": interleaved}
    weights = [norm.float() for norm in norms]
    reference.rope_and_cache(
        expected, expected_cache, positions, slots, cos_sin, num_q_heads, q_norm=weights[0], k_norm=weights[1], **layout
    )
    rope_and_cache(qkv, cache, positions, slots, cos_sin, num_q_heads, q_norm=norms[0], k_norm=norms[1], **layout)
    assert relative_error(qkv, expected) <= BOUNDS[shape.dtype]
    assert relative_error(cache, expected_cache) <= BOUNDS[shape.dtype]


@pytest.mark.parametrize(("shape", "device"), cases(SMALL[:2], GRID[:3]))
def test_queries_are_scaled_by_their_position(shape: Shape, device: str) -> None:
    num_tokens, num_q_heads = 5, shape.group * shape.num_kv_heads
    qkv = torch.randn(num_tokens, (num_q_heads + 2 * shape.num_kv_heads) * shape.head_dim, device=device)
    qkv = qkv.to(shape.dtype)
    positions, slots = (torch.randperm(16, dtype=torch.int32, device=device)[:num_tokens] for _ in range(2))
    cos_sin, query_scale = torch.randn(16, shape.head_dim, device=device), torch.rand(16, device=device) + 0.5
    cache = torch.zeros(1, 2, shape.num_kv_heads, 16, shape.head_dim, dtype=shape.dtype, device=device)
    expected, expected_cache = qkv.float(), cache.float()
    args = (positions, slots, cos_sin, num_q_heads)
    reference.rope_and_cache(expected, expected_cache, *args, query_scale=query_scale)
    rope_and_cache(qkv, cache, *args, query_scale=query_scale)
    assert relative_error(qkv, expected) <= BOUNDS[shape.dtype]
    assert relative_error(cache, expected_cache) <= BOUNDS[shape.dtype]


@pytest.mark.parametrize(("shape", "device"), cases(SMALL[:2], [GRID[0], GRID[5], GRID[10]]))
def test_keys_and_values_are_written_in_8_bits(shape: Shape, device: str) -> None:
    num_tokens, num_kv_heads, num_q_heads = 20, shape.num_kv_heads, shape.group * shape.num_kv_heads
    kv_scale = random_kv_scale(num_kv_heads, device)
    heads = torch.randn(num_tokens, num_q_heads + 2 * num_kv_heads, shape.head_dim, device=device)
    cos_sin = torch.randn(MAX_POSITION, shape.head_dim, device=device)
    if device == "cpu":
        # The interpreter rounds wrongly to 8 bits: values and scales that need no rounding.
        kv_scale = torch.tensor([[0.5, 2.0], [1.0, 0.25]])
        heads[:, num_q_heads:] = heads[:, num_q_heads:].to(FP8).float() * kv_scale.view(-1, 1)
        cos_sin = (torch.arange(shape.head_dim) < shape.head_dim // 2).float().expand(MAX_POSITION, -1).contiguous()
    heads[3, num_q_heads:] = 1e4  # beyond what 8 bits hold
    qkv = heads.to(shape.dtype).flatten(1)
    positions = torch.randint(MAX_POSITION, (num_tokens,), dtype=torch.int32, device=device)
    slots = torch.randperm(2 * shape.block_size, device=device)[:num_tokens].int()
    slots[5] = -1
    size = (2, 2, num_kv_heads, shape.block_size, shape.head_dim)
    caches = [torch.zeros(size, device=device).to(FP8) for _ in range(2)]
    expected = qkv.clone()
    for one, cache, rope in ((qkv, caches[0], rope_and_cache), (expected, caches[1], reference.rope_and_cache)):
        rope(one, cache, positions, slots, cos_sin, num_q_heads, kv_scale=kv_scale)
    found, wanted = (reference.dequantize_kv(cache, kv_scale, torch.float32) for cache in caches)
    assert relative_error(found, wanted) <= (0 if device == "cpu" else 1e-2)
    assert relative_error(qkv, expected) <= BOUNDS[shape.dtype]


@pytest.mark.parametrize(("shape", "device"), cases(SMALL[:2], GRID[:3]))
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("rotary_dim", [0, 32])
def test_without_a_pool_queries_and_keys_rotate_in_place(
    shape: Shape, device: str, normed: bool, rotary_dim: int
) -> None:
    num_tokens, num_q_heads, num_kv_heads = 7, shape.group * shape.num_kv_heads, shape.num_kv_heads
    heads = torch.randn(num_tokens, num_q_heads + 2 * num_kv_heads, shape.head_dim, device=device).to(shape.dtype)
    norms = [(torch.rand(shape.head_dim, device=device) + 0.5).to(shape.dtype) for _ in range(2)]
    positions = torch.randperm(16, dtype=torch.int32, device=device)[:num_tokens]
    cos_sin = cos_sin_table(RopeConfig("default", 100.0, rotary_dim=rotary_dim), shape.head_dim, 16).to(device)
    values = heads[:, num_q_heads + num_kv_heads :].clone()
    wide = {"q_norm": norms[0].float(), "k_norm": norms[1].float()} if normed else {}
    expected = heads.float()
    oracle.rope_in_place(expected.view(num_tokens, -1), positions, cos_sin, num_q_heads, rotary_dim=rotary_dim, **wide)
    weights = {"q_norm": norms[0], "k_norm": norms[1]} if normed else {}
    rope_in_place(heads.view(num_tokens, -1), positions, cos_sin, num_q_heads, rotary_dim=rotary_dim, **weights)
    assert relative_error(heads, expected) <= BOUNDS[shape.dtype]
    assert torch.equal(heads[:, num_q_heads + num_kv_heads :], values)
