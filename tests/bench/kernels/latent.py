"""Benchmark rows of latent attention: decodes of 16 to 128 heads over the vectors of DeepSeek's models, and prompts."""

from __future__ import annotations

import functools
from itertools import product

import torch
from bench.kernels.case import BYTES, FLOPS, Case, Prepared, relative_error
from bench.kernels.timing import num_copies
from torch import Tensor

from baton.kernels.attention.latent_decode import LatentWorkspace, cut_latents, latent_decode_attention
from baton.kernels.attention.latent_passes import plan_latent_tiles
from baton.kernels.attention.latent_prefill import latent_prefill_attention
from baton.kernels.reference.attention import latent_attention as reference

_KV_RANK, _NOPE_DIM, _ROPE_DIM, _VALUE_DIM = 512, 128, 64, 128
_DIM = _KV_RANK + _ROPE_DIM
_HEADS = (16, 64, 128)
_DECODES = ((1, 32_768), (16, 4096), (64, 4096), (256, 4096))  # sequences, tokens
_PROMPTS = (4096, 8192)
_BALANCE = 206  # operations a byte, of an H200 at its best
_HALF = 2  # bytes
_CHECKED = 2  # sequences
_CHECKED_TOKENS = 256
_SCALE = (_NOPE_DIM + _ROPE_DIM) ** -0.5
_MOST_KEYS = 4096  # made at once


def latent_cases(block_size: int) -> list[Case]:
    """Returns decode cases, then prefill cases."""
    return [
        *(_decode_case(heads, *sizes, block_size) for heads, sizes in product(_HEADS, _DECODES)),
        *(_prefill_case(heads, num_tokens, block_size) for heads, num_tokens in product(_HEADS[:2], _PROMPTS)),
    ]


def _decode_case(num_heads: int, num_seqs: int, seq_len: int, block_size: int) -> Case:
    operations = 2.0 * num_heads * (_DIM + _KV_RANK) * num_seqs * seq_len
    num_bytes = float(_HALF * _DIM * num_seqs * seq_len)
    bound = operations / num_bytes > _BALANCE
    return Case(
        "latent decode attention",
        f"{num_heads} heads, {num_seqs} x {seq_len}",
        FLOPS if bound else BYTES,
        operations if bound else num_bytes,
        functools.partial(_prepare_decode, num_heads, num_seqs, seq_len, block_size),
    )


def _prefill_case(num_heads: int, num_tokens: int, block_size: int) -> Case:
    pairs = num_tokens * num_tokens / 2
    made = 2.0 * num_tokens * _KV_RANK * num_heads * (_NOPE_DIM + _VALUE_DIM)
    return Case(
        "latent prefill attention",
        f"{num_heads} heads, {num_tokens}",
        FLOPS,
        2.0 * num_heads * (_NOPE_DIM + _ROPE_DIM + _VALUE_DIM) * pairs + made,
        functools.partial(_prepare_prefill, num_heads, num_tokens, block_size),
    )


def _prepare_decode(num_heads: int, num_seqs: int, seq_len: int, block_size: int, device: torch.device) -> Prepared:
    per_seq = -(-seq_len // block_size)
    copies = num_copies(_HALF * _DIM * num_seqs * seq_len)
    caches = [_random_cache(num_seqs * per_seq, block_size, device) for _ in range(copies)]
    table = torch.randperm(num_seqs * per_seq, device=device).int().view(num_seqs, per_seq)
    rows = torch.arange(num_seqs, dtype=torch.int32, device=device)
    lengths = torch.full((num_seqs,), seq_len, dtype=torch.int32, device=device)
    kv_b = _random_kv_b(num_heads, device)
    query = torch.randn(num_seqs, num_heads, _NOPE_DIM + _ROPE_DIM, device=device).bfloat16()
    lifted = torch.bmm(query[..., :_NOPE_DIM].transpose(0, 1), kv_b[:, :_NOPE_DIM]).transpose(0, 1)
    workspace = LatentWorkspace(num_seqs, num_heads, _KV_RANK, device)
    cuts = cut_latents(lengths, num_heads, _KV_RANK, caches[0])  # once per step, for all layers

    def launch(cache: Tensor) -> Tensor:
        return latent_decode_attention(lifted, query[..., _NOPE_DIM:], cache, table, rows, cuts, _SCALE, workspace)

    def error() -> float:
        used = slice(0, _CHECKED)
        summed = launch(caches[0])[used].float()
        found = torch.einsum("nhr,hdr->nhd", summed, kv_b[:, _NOPE_DIM:].float())
        wide = (query[used].float(), caches[0].float(), table[used], lengths[used], kv_b.float())
        return relative_error(found, reference.latent_decode_attention(*wide, _SCALE))

    return Prepared([functools.partial(launch, cache) for cache in caches], error)


def _prepare_prefill(num_heads: int, num_tokens: int, block_size: int, device: torch.device) -> Prepared:
    num_blocks = -(-num_tokens // block_size)
    cache, kv_b = _random_cache(num_blocks, block_size, device), _random_kv_b(num_heads, device)
    table = torch.randperm(num_blocks, device=device).view(1, -1).int()
    numbers = torch.tensor([0, num_tokens, 0, num_tokens], dtype=torch.int32, device=device)
    rows, lengths, starts = numbers[:1], numbers[1:2], numbers[2:]
    query = torch.randn(num_tokens, num_heads, _NOPE_DIM + _ROPE_DIM, device=device).bfloat16()
    tiles = plan_latent_tiles([num_tokens], [0], _MOST_KEYS, device)

    def launch() -> Tensor:
        return latent_prefill_attention(query, cache, table, rows, lengths, starts, tiles, kv_b, _SCALE)

    def error() -> float:
        last = slice(num_tokens - _CHECKED_TOKENS, num_tokens)
        own_starts = torch.tensor([0, _CHECKED_TOKENS])
        wide = (query[last].float(), cache.float(), table, lengths, own_starts, kv_b.float())
        return relative_error(launch()[last], reference.latent_prefill_attention(*wide, _SCALE))

    return Prepared([launch], error)


def _random_cache(num_blocks: int, block_size: int, device: torch.device) -> Tensor:
    return torch.randn(num_blocks, 1, 1, block_size, _DIM, device=device).bfloat16()


def _random_kv_b(num_heads: int, device: torch.device) -> Tensor:
    return (torch.randn(num_heads, _NOPE_DIM + _VALUE_DIM, _KV_RANK, device=device) * _KV_RANK**-0.5).bfloat16()
