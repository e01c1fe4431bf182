"""Bidirectional attention within whole sequences that lie one after another, without padding and without a cache."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

_MASK_ELEMENTS = 1 << 22  # per tile of a window


class Run(NamedTuple):
    """Neighbouring sequences of one length."""

    start: int  # of their tokens
    num_seqs: int
    seq_len: int

    @property
    def stop(self) -> int:
        return self.start + self.num_seqs * self.seq_len


def runs_of(seq_lens: Iterable[int]) -> list[Run]:
    """Returns the runs of sequences that lie in this order."""
    runs: list[Run] = []
    for seq_len in seq_lens:
        if runs and runs[-1].seq_len == seq_len:
            runs[-1] = runs[-1]._replace(num_seqs=runs[-1].num_seqs + 1)
        else:
            runs.append(Run(runs[-1].stop if runs else 0, 1, seq_len))
    return runs


def whole_attention(
    qkv: Tensor,
    runs: list[Run],
    num_kv_heads: int,
    scale: float,
    window: int = 0,
    *,
    relative: Tensor | None = None,
    buckets: Tensor | None = None,
) -> Tensor:
    """Returns softmax_j(scale q_i K_j + r_ij) V_j over the tokens j of each sequence, [num_tokens, num_q_heads *
    head_dim].

    qkv [num_tokens, num_q_heads + 2 num_kv_heads, head_dim]. With a window, |i - j| < window. r_ij is 0, or
    relative [num_buckets, num_q_heads] of the bucket of j - i; buckets [2 n - 1] int32 begin with that of 1 - n.
    """
    assert not (window and relative is not None), "no family has both"
    parts = [
        _attend(qkv[run.start : run.stop], run, num_kv_heads, scale, window, _scores(relative, buckets, run.seq_len))
        for run in runs
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _scores(relative: Tensor | None, buckets: Tensor | None, seq_len: int) -> Tensor | None:
    """Returns the scores [num_q_heads, seq_len, seq_len] of distances."""
    if relative is None or buckets is None:
        return None
    middle = len(buckets) // 2
    by_distance = relative.t().index_select(1, buckets[middle - seq_len + 1 : middle + seq_len])
    return by_distance.unfold(1, seq_len, 1).flip(1)


def _attend(qkv: Tensor, run: Run, num_kv_heads: int, scale: float, window: int, scores: Tensor | None) -> Tensor:
    heads = qkv.unflatten(0, (run.num_seqs, run.seq_len)).transpose(1, 2)
    num_q_heads = heads.shape[1] - 2 * num_kv_heads
    query, keys, values = heads.split((num_q_heads, num_kv_heads, num_kv_heads), dim=1)
    if num_kv_heads != num_q_heads:
        keys, values = (each.repeat_interleave(num_q_heads // num_kv_heads, dim=1) for each in (keys, values))
    if window and run.seq_len > window:
        out = _windowed(query, keys, values, scale, window)
    else:
        scores = None if scores is None else scores.to(query.dtype)
        out = functional.scaled_dot_product_attention(query, keys, values, attn_mask=scores, scale=scale)
    return out.transpose(1, 2).reshape(run.num_seqs * run.seq_len, -1)


def _windowed(query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int) -> Tensor:
    """Computes tiles of queries with the keys that some of them see; longer tiles would see more masked ones."""
    seq_len = query.shape[2]
    tile = max(1, min(2 * window, _MASK_ELEMENTS // seq_len))
    out = []
    for start in range(0, seq_len, tile):
        stop = min(start + tile, seq_len)
        first, last = max(0, start - window + 1), min(seq_len, stop + window - 1)
        distance = torch.arange(start, stop)[:, None] - torch.arange(first, last)
        seen = (distance.abs() < window).to(query.device)
        out.append(
            functional.scaled_dot_product_attention(
                query[:, :, start:stop], keys[:, :, first:last], values[:, :, first:last], attn_mask=seen, scale=scale
            )
        )
    return torch.cat(out, dim=2)
