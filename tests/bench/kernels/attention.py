"""Benchmark rows of attention: the shapes that FlashAttention-3 was measured on, with a pool in random order."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping

import torch
from bench.kernels.case import BYTES, FLOPS, Case, ModelShape, Prepared, relative_error
from bench.kernels.timing import num_copies
from torch import Tensor

from baton.kernels import reference
from baton.kernels.attention.decode import DecodeWorkspace, cut_for_decode, decode_attention
from baton.kernels.attention.prefill import make_tiles, prefill_attention

# FlashAttention-3 on one H200 (block 16, 32 q heads, 8 kv heads, head_dim 128, bf16), 2026-11-21.
FA3_SHAPE = (32, 8, 128)
FA3_DECODE_US: Mapping[tuple[int, int], float] = {
    (1, 8192): 25.3,
    (16, 4096): 81.7,
    (64, 4096): 264.6,
    (256, 1024): 284.3,
    (256, 4096): 994.7,
}
# One long sequence among many short ones, as in a batch of prompts of all lengths.
LONG, SHORT, NUM_SHORT = 32_768, 640, (15, 63, 255)
NEW_TOKENS, CACHED_PREFIXES = 16, (4096, 32_768)  # a cached prompt with a new end
FA3_PREFILL_TFLOP_S: Mapping[int, float] = {2048: 442, 8192: 558, 16384: 588}

_TILE_ROWS = 128
_CHECKED_SEQS = 2
_CHECKED_QUERIES = 256
_HOPPER = (9, 0)


def attention_cases(shape: ModelShape, block_size: int) -> list[Case]:
    """Returns decode cases, then prefill cases for each kernel."""
    return [*_decode_cases(shape, block_size), *_prefill_cases(shape, block_size), *_hit_cases(shape, block_size)]


def _is_fa3_shape(shape: ModelShape) -> bool:
    return (shape.num_q_heads, shape.num_kv_heads, shape.head_dim) == FA3_SHAPE


def _decode_cases(shape: ModelShape, block_size: int) -> list[Case]:
    return [
        Case(
            "decode attention",
            f"{num_seqs} x {seq_len}",
            BYTES,
            4.0 * num_seqs * seq_len * shape.num_kv_heads * shape.head_dim,
            functools.partial(_prepare_decode, shape, block_size, [seq_len] * num_seqs),
            *(("FA3", fa3_us) if _is_fa3_shape(shape) else ()),
        )
        for (num_seqs, seq_len), fa3_us in FA3_DECODE_US.items()
    ] + [
        Case(
            "decode attention",
            f"1 x {LONG} and {num_short} x {SHORT}",
            BYTES,
            4.0 * (LONG + num_short * SHORT) * shape.num_kv_heads * shape.head_dim,
            functools.partial(_prepare_decode, shape, block_size, [LONG] + [SHORT] * num_short),
        )
        for num_short in NUM_SHORT
    ]


def _prepare_decode(shape: ModelShape, block_size: int, seq_lens: list[int], device: torch.device) -> Prepared:
    num_seqs, per_seq = len(seq_lens), -(-max(seq_lens) // block_size)
    copies = num_copies(4 * sum(seq_lens) * shape.num_kv_heads * shape.head_dim)
    needed = [-(-seq_len // block_size) for seq_len in seq_lens]
    caches = [_random_cache(shape, sum(needed), block_size, device) for _ in range(copies)]
    blocks = torch.randperm(sum(needed), device=device).int().split(needed)
    table = torch.zeros(num_seqs, per_seq, dtype=torch.int32, device=device)
    for row, own in zip(table, blocks, strict=True):
        row[: len(own)] = own
    rows = torch.arange(num_seqs, dtype=torch.int32, device=device)
    lengths = torch.tensor(seq_lens, dtype=torch.int32, device=device)
    query = torch.randn(num_seqs, shape.num_q_heads, shape.head_dim, device=device).bfloat16()
    scale = 1 / math.sqrt(shape.head_dim)
    workspace = DecodeWorkspace(num_seqs, shape.num_q_heads, shape.num_kv_heads, shape.head_dim, device)
    cuts = cut_for_decode(lengths, caches[0], query.dtype)  # once per step, for all layers

    def launch(cache: Tensor) -> Tensor:
        return decode_attention(query, cache, table, rows, cuts, scale, workspace)

    def error() -> float:
        checked = slice(0, _CHECKED_SEQS)
        cache, own_table = _own_blocks(caches[0], table[checked])
        expected = reference.decode_attention(query[checked].float(), cache, own_table, lengths[checked], scale)
        return relative_error(launch(caches[0])[checked], expected)

    return Prepared([functools.partial(launch, cache) for cache in caches], error)


def _prefill_cases(shape: ModelShape, block_size: int) -> list[Case]:
    cases = []
    for seq_len, tflop_s in FA3_PREFILL_TFLOP_S.items():
        work = 2.0 * shape.num_q_heads * shape.head_dim * seq_len**2
        peer = ("FA3", work / tflop_s / 1e6) if _is_fa3_shape(shape) else ()
        for name, kernel in _prefill_kernels(shape).items():
            prepare = functools.partial(_prepare_prefill, shape, block_size, seq_len, kernel)
            cases.append(Case(f"prefill attention, {name}", str(seq_len), FLOPS, work, prepare, *peer))
    return cases


def _hit_cases(shape: ModelShape, block_size: int) -> list[Case]:
    """Returns cases of a few new tokens after a cached prefix, with the tile whole and cut into parts."""
    if "hopper" not in _prefill_kernels(shape):
        return []
    return [
        Case(
            f"prefill attention, {name}",
            f"{NEW_TOKENS} behind {prefix}",
            BYTES,
            4.0 * (prefix + NEW_TOKENS) * shape.num_kv_heads * shape.head_dim,
            functools.partial(_prepare_hit, shape, block_size, prefix, cut),
        )
        for prefix in CACHED_PREFIXES
        for name, cut in (("in parts", True), ("whole", False))
    ]


def _prepare_hit(shape: ModelShape, block_size: int, prefix: int, cut: bool, device: torch.device) -> Prepared:
    from baton.kernels.attention.prefill_hopper import PrefillWorkspace, prefill_attention_hopper

    seq_len = prefix + NEW_TOKENS
    num_blocks = -(-seq_len // block_size)
    copies = num_copies(4 * seq_len * shape.num_kv_heads * shape.head_dim)
    caches = [_random_cache(shape, num_blocks, block_size, device) for _ in range(copies)]
    table = torch.randperm(num_blocks, device=device).view(1, -1).int()
    numbers = torch.tensor([0, seq_len, 0, NEW_TOKENS], dtype=torch.int32, device=device)
    rows, lengths, starts = numbers[:1], numbers[1:2], numbers[2:]
    query = torch.randn(NEW_TOKENS, shape.num_q_heads, shape.head_dim, device=device).bfloat16()
    tiles = make_tiles([NEW_TOKENS], [prefix], _TILE_ROWS, device, shape.num_q_heads)
    workspace = PrefillWorkspace(shape.num_q_heads, shape.head_dim, device) if cut else None
    scale = 1 / math.sqrt(shape.head_dim)

    def launch(cache: Tensor) -> Tensor:
        return prefill_attention_hopper(query, cache, table, rows, lengths, starts, tiles, scale, workspace=workspace)

    def error() -> float:
        wide, own_table = _own_blocks(caches[0], table)
        return _prefill_error(launch(caches[0]), query, wide, own_table, scale, 0, NEW_TOKENS, prefix)

    return Prepared([functools.partial(launch, cache) for cache in caches], error)


def _prepare_prefill(
    shape: ModelShape, block_size: int, seq_len: int, kernel: Callable[..., Tensor], device: torch.device
) -> Prepared:
    num_blocks = -(-seq_len // block_size)
    cache = _random_cache(shape, num_blocks, block_size, device)
    table = torch.randperm(num_blocks, device=device).view(1, -1).int()
    rows = torch.zeros(1, dtype=torch.int32, device=device)
    lengths = torch.tensor([seq_len], dtype=torch.int32, device=device)
    starts = torch.tensor([0, seq_len], dtype=torch.int32, device=device)
    query = torch.randn(seq_len, shape.num_q_heads, shape.head_dim, device=device).bfloat16()
    tiles = make_tiles([seq_len], [0], _TILE_ROWS, device)
    scale = 1 / math.sqrt(shape.head_dim)

    def launch() -> Tensor:
        return kernel(query, cache, table, rows, lengths, starts, tiles, scale)

    def error() -> float:
        out = launch()
        wide, own_table = _own_blocks(cache, table)
        return max(
            _prefill_error(out, query, wide, own_table, scale, first, first + _CHECKED_QUERIES)
            for first in (0, seq_len // 2 + 1, seq_len - _CHECKED_QUERIES)
        )

    return Prepared([launch], error)


def _prefill_error(
    out: Tensor, query: Tensor, cache: Tensor, table: Tensor, scale: float, first: int, last: int, prefix: int = 0
) -> float:
    """Returns the error of rows first to last, which are the last tokens of a shorter sequence after the prefix."""
    lengths = torch.tensor([prefix + last], dtype=torch.int32, device=out.device)
    starts = torch.tensor([0, last - first], dtype=torch.int32, device=out.device)
    rows = slice(first, last)
    expected = reference.prefill_attention(query[rows].float(), cache, table, lengths, starts, scale)
    return relative_error(out[rows], expected)


def _prefill_kernels(shape: ModelShape) -> dict[str, Callable[..., Tensor]]:
    """Returns the kernels that run on this GPU."""
    kernels: dict[str, Callable[..., Tensor]] = {}
    if torch.cuda.is_available() and torch.cuda.get_device_capability() == _HOPPER and shape.head_dim in (64, 128):
        from baton.kernels.attention.prefill_hopper import prefill_attention_hopper

        kernels["hopper"] = prefill_attention_hopper
    kernels["generic"] = prefill_attention
    return kernels


def _random_cache(shape: ModelShape, num_blocks: int, block_size: int, device: torch.device) -> Tensor:
    size = (num_blocks, 2, shape.num_kv_heads, block_size, shape.head_dim)
    return torch.randn(size, dtype=torch.bfloat16, device=device)


def _own_blocks(cache: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the blocks of some sequences in fp32, and a table into them."""
    own = cache[table.flatten().long()].float()
    return own, torch.arange(table.numel(), dtype=torch.int32, device=table.device).view(table.shape)
