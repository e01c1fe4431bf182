"""Latent attention against its oracle in float64, and the oracle against keys and values made one by one."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from support.kernels.harness import BOUNDS, Paged, Shape, cases, paged_kv, relative_error
from torch import Tensor

from baton.kernels.reference.attention import latent_attention as reference
from baton.kernels.reference.rope.latent_cache import latent_rope_and_cache as oracle


class Sizes(NamedTuple):
    num_heads: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def dim(self) -> int:
        return self.kv_rank + self.rope_dim

    def __str__(self) -> str:
        return f"h{self.num_heads}-{self.kv_rank}-{self.nope_dim}-{self.block_size}-{str(self.dtype)[6:]}"


# Heads that fill no tile, one and several; widths that are no power of two.
SMALL = [
    Sizes(4, 32, 16, 8, 12, 8, torch.float32),
    Sizes(20, 48, 24, 16, 32, 16, torch.float16),
    Sizes(128, 32, 16, 16, 16, 64, torch.float16),
]
GRID = [
    Sizes(16, 512, 128, 64, 128, 16, torch.bfloat16),
    Sizes(20, 512, 192, 64, 256, 64, torch.bfloat16),
    Sizes(40, 256, 64, 32, 64, 16, torch.float16),
    Sizes(64, 512, 128, 64, 128, 32, torch.bfloat16),
    Sizes(128, 512, 128, 64, 128, 64, torch.bfloat16),
    Sizes(16, 512, 128, 64, 128, 16, torch.float32),
]
LENGTHS = [1, 7, 64, 65, 300, 513]


def latents_of(seq_lens: list[int], sizes: Sizes, device: str) -> Paged:
    paged = paged_kv(seq_lens, Shape(sizes.dim, sizes.block_size, sizes.dtype, 1, 1), device)
    return paged._replace(cache=paged.cache[:, :1].contiguous())


def weights_of(sizes: Sizes, device: str) -> Tensor:
    size = (sizes.num_heads, sizes.nope_dim + sizes.value_dim, sizes.kv_rank)
    return (torch.randn(size, device=device) / math.sqrt(sizes.kv_rank)).to(sizes.dtype)


def queries_of(num_tokens: int, sizes: Sizes, device: str) -> Tensor:
    """A part of wider rows."""
    wide = torch.randn(num_tokens, sizes.num_heads + 1, sizes.nope_dim + sizes.rope_dim, device=device)
    return wide.to(sizes.dtype)[:, : sizes.num_heads]


def plainly(query: Tensor, paged: Paged, kv_b: Tensor, counts: list[int], scale: float) -> Tensor:
    """Every sequence's last tokens by keys and values of each head, in float64."""
    kv_rank, rope_dim = kv_b.shape[2], paged.cache.shape[4] - kv_b.shape[2]
    nope_dim = query.shape[2] - rope_dim
    out, start = [], 0
    for table, seq_len, count in zip(paged.own_table.tolist(), paged.seq_lens.tolist(), counts, strict=True):
        vectors = torch.cat([paged.cache[block, 0, 0] for block in table])[:seq_len].double()
        made = torch.einsum("tr,hdr->htd", vectors[:, :kv_rank], kv_b.double())
        turned = vectors[:, kv_rank:].expand(len(made), -1, -1)
        keys, values = torch.cat((made[..., :nope_dim], turned), -1), made[..., nope_dim:]
        scores = torch.einsum("thd,hsd->hts", query[start : start + count].double(), keys) * scale
        hidden = torch.ones(count, seq_len, dtype=torch.bool, device=query.device).triu(seq_len - count + 1)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out.append(torch.einsum("hts,hsd->thd", weights, values))
        start += count
    return torch.cat(out)


@pytest.mark.parametrize("counts", [[1] * 4, [1, 3, 40, 64], [1, 7, 64, 300]])
def test_the_oracle_is_attention_with_keys_and_values_of_each_head(counts: list[int]) -> None:
    torch.manual_seed(0)
    sizes, lengths = SMALL[0], [1, 7, 64, 300]
    paged, kv_b = latents_of(lengths, sizes, "cpu"), weights_of(sizes, "cpu")
    query, scale = queries_of(sum(counts), sizes, "cpu"), 0.2
    expected = plainly(query, paged, kv_b, counts, scale)
    starts = torch.tensor([0, *counts]).cumsum(0)
    table, lens = paged.own_table, paged.seq_lens
    found = reference.latent_prefill_attention(query, paged.cache, table, lens, starts, kv_b, scale)
    assert relative_error(found, expected) < 1e-5
    if max(counts) == 1:
        found = reference.latent_decode_attention(query, paged.cache, table, lens, kv_b, scale)
        assert relative_error(found, expected) < 1e-5


@pytest.mark.parametrize(("sizes", "device"), cases(SMALL, GRID))
@pytest.mark.parametrize("lengths", [LENGTHS, [700]], ids=["several", "cut"])
def test_decodes_equal_the_oracle(sizes: Sizes, device: str, lengths: list[int]) -> None:
    from baton.kernels.attention.latent_decode import LatentWorkspace, cut_latents, latent_decode_attention

    torch.manual_seed(1)
    paged, kv_b = latents_of(lengths, sizes, device), weights_of(sizes, device)
    query, scale = queries_of(len(lengths), sizes, device), (sizes.nope_dim + sizes.rope_dim) ** -0.5
    workspace = LatentWorkspace(len(lengths), sizes.num_heads, sizes.kv_rank, torch.device(device))
    workspace.partial.fill_(float("nan"))
    cuts = cut_latents(paged.seq_lens, sizes.num_heads, sizes.kv_rank, paged.cache)
    plain = query[..., : sizes.nope_dim].transpose(0, 1)
    lifted = torch.bmm(plain, kv_b[:, : sizes.nope_dim]).transpose(0, 1)
    rest = (paged.cache, paged.block_table, paged.rows, cuts, scale, workspace)
    summed = latent_decode_attention(lifted, query[..., sizes.nope_dim :], *rest)
    found = torch.einsum("nhr,hdr->nhd", summed.double(), kv_b[:, sizes.nope_dim :].double())
    expected = plainly(query, paged, kv_b, [1] * len(lengths), scale)
    assert relative_error(found, expected) < BOUNDS[sizes.dtype]


@pytest.mark.parametrize(("sizes", "device"), cases(SMALL, GRID))
@pytest.mark.parametrize("most_keys", [4096, 100], ids=["one pass", "passes"])
def test_prompts_equal_the_oracle(sizes: Sizes, device: str, most_keys: int) -> None:
    from baton.kernels.attention.latent_passes import plan_latent_tiles
    from baton.kernels.attention.latent_prefill import latent_prefill_attention

    torch.manual_seed(2)
    lengths, counts = [1, 40, 140, 130, 200], [1, 40, 3, 130, 65]
    paged, kv_b = latents_of(lengths, sizes, device), weights_of(sizes, device)
    query, scale = queries_of(sum(counts), sizes, device), (sizes.nope_dim + sizes.rope_dim) ** -0.5
    prefixes = [length - count for length, count in zip(lengths, counts, strict=True)]
    tiles = plan_latent_tiles(counts, prefixes, most_keys, torch.device(device))
    assert (len(tiles.passes) > 1) == (most_keys < sum(lengths))
    starts = torch.tensor([0, *counts], device=device).cumsum(0).int()
    rest = (paged.block_table, paged.rows, paged.seq_lens, starts, tiles, kv_b, scale)
    found = latent_prefill_attention(query, paged.cache, *rest)
    assert relative_error(found, plainly(query, paged, kv_b, counts, scale)) < BOUNDS[sizes.dtype]


@pytest.mark.parametrize(("sizes", "device"), cases(SMALL, GRID))
@pytest.mark.parametrize("interleaved", [True, False])
def test_what_is_cached_equals_the_oracle(sizes: Sizes, device: str, interleaved: bool) -> None:
    from baton.kernels.rope.latent_cache import latent_rope_and_cache

    torch.manual_seed(3)
    num_tokens, qk_dim = 9, sizes.nope_dim + sizes.rope_dim
    wide = torch.randn(num_tokens, sizes.num_heads * qk_dim + sizes.dim, device=device).to(sizes.dtype)
    query, latent = wide.split((sizes.num_heads * qk_dim, sizes.dim), 1)  # type: ignore[no-untyped-call]
    before = wide.clone()
    norm = (torch.rand(sizes.kv_rank, device=device) + 0.5).to(sizes.dtype)
    angles = torch.rand(40, sizes.rope_dim // 2, device=device) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1)
    positions = torch.randint(40, (num_tokens,), device=device).int()
    slots = torch.randperm(4 * sizes.block_size, device=device)[:num_tokens].int()
    slots[2] = -1
    cache = torch.zeros(4, 1, 1, sizes.block_size, sizes.dim, dtype=sizes.dtype, device=device)
    options = {"num_heads": sizes.num_heads, "eps": 1e-6, "interleaved": interleaved}
    latent_rope_and_cache(query, latent, cache, positions, slots, cos_sin, norm, **options)
    wanted, expected = before.float(), torch.zeros_like(cache, dtype=torch.float32)
    parts = wanted.split((sizes.num_heads * qk_dim, sizes.dim), 1)  # type: ignore[no-untyped-call]
    oracle(*parts, expected, positions, slots, cos_sin, norm.float(), **options)
    assert relative_error(wide, wanted) < BOUNDS[sizes.dtype]
    assert relative_error(cache, expected) < BOUNDS[sizes.dtype]
    assert int((expected.view(-1, sizes.dim) != 0).any(1).sum()) == num_tokens - 1
