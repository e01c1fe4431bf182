"""Adds LoRA updates to a linear's output, grouped by adapter. Rows without an adapter cost nothing."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def add_adapters(
    x: Tensor,
    out: Tensor,
    a: Tensor,
    b: Tensor,
    ranks: Tensor,
    scales: Tensor,
    ends: Sequence[int],
    order: Tensor,
    tiles: Tensor,
) -> Tensor:
    """out[t, part] += scales[s, part] * b[s, part] @ (a[s, part] @ x[t]) for each row t with the adapter in slot s.

    x [num_tokens, in_features], out [num_tokens, out_features], a [num_slots, num_parts, max_rank, in_features],
    b [num_slots, out_features, max_rank], ranks and scales [num_slots, num_parts], where rank 0 is no update;
    ends: the column after each part's last one; order [num_rows]: rows with an adapter, those of a slot side by side;
    tiles [num_tiles, 3]: slot, first index into `order`, number of rows, which may be 0. Returns out.
    """
    known_ranks, known_scales = ranks.tolist(), scales.tolist()
    for slot, start, count in tiles.tolist():
        if not count or not any(known_ranks[slot]):
            continue
        rows = order[start : start + count]
        mine = x.index_select(0, rows).to(a.dtype)
        begin = 0
        for part, end in enumerate(ends):
            if rank := known_ranks[slot][part]:
                low = mine @ a[slot, part, :rank].t()
                update = low @ b[slot, begin:end, :rank].t()
                out[:, begin:end].index_add_(0, rows, update.to(out.dtype), alpha=known_scales[slot][part])
            begin = end
    return out


def embed_adapters(
    token_ids: Tensor,
    out: Tensor,
    a: Tensor,
    b: Tensor,
    ranks: Tensor,
    scales: Tensor,
    order: Tensor,
    tiles: Tensor,
) -> Tensor:
    """out[t] += scales[s] * b[s] @ a[s, :, token_ids[t]] for each row t with the adapter in slot s.

    token_ids [num_tokens], out [num_tokens, hidden_size], a [num_slots, 1, max_rank, vocab_size]; the rest is as in
    `add_adapters`, of one part. Returns out.
    """
    known_ranks, known_scales = ranks.tolist(), scales.tolist()
    for slot, start, count in tiles.tolist():
        if not count or not (rank := known_ranks[slot][0]):
            continue
        rows = order[start : start + count]
        low = a[slot, 0, :rank].index_select(1, token_ids.index_select(0, rows)).t()
        out.index_add_(0, rows, low @ b[slot, :, :rank].t(), alpha=known_scales[slot][0])
    return out
