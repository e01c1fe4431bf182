"""Reads and writes the states of sequences as whole matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.kernels.recurrent_states import States


def read_states(states: States, num_heads: int) -> Tensor:
    """Returns the initial states [num_seqs, num_heads, rows, columns] in fp32."""
    pool, ids = states.pool, states.read
    pieces = pool[ids.clamp(min=0).long()].float().masked_fill((ids < 0)[..., None, None], 0.0)
    num_seqs, (_, rows, width) = ids.shape[0], pool.shape
    split = pieces.view(num_seqs, num_heads, -1, rows, width)
    return split.transpose(2, 3).reshape(num_seqs, num_heads, rows, -1)


def write_states(states: States, final: Tensor) -> None:
    """Writes the final states [num_seqs, num_heads, rows, columns] that are kept."""
    ids = states.write.flatten()
    pieces = _pieces(states.pool, final)
    kept = (ids >= 0).nonzero().flatten()
    _put(states.pool, ids[kept], pieces[kept])


def put_states(pool: Tensor, ids: Tensor, final: Tensor) -> None:
    """Writes states [num_seqs, num_heads, rows, columns], of which all are kept, to the pieces `ids`."""
    _put(pool, ids, _pieces(pool, final))


def _pieces(pool: Tensor, final: Tensor) -> Tensor:
    num_seqs, num_heads, rows, columns = final.shape
    width = pool.shape[2]
    split = final.view(num_seqs, num_heads, rows, columns // width, width).transpose(2, 3)
    return split.reshape(-1, rows, width).to(pool.dtype)


def _put(pool: Tensor, ids: Tensor, pieces: Tensor) -> None:
    _, rows, width = pool.shape
    if pool.stride(0) >= rows * width:
        pool[ids.long()] = pieces
    else:  # PyTorch refuses indexed writes to overlapping pieces
        flat = pool.as_strided(((pool.shape[0] - 1) * pool.stride(0) + rows * width,), (1,))
        values = torch.arange(rows * width, device=pool.device)
        flat[ids.long()[:, None] * pool.stride(0) + values] = pieces.flatten(1)
