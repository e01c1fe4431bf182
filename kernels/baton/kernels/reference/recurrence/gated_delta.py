"""The gated delta rule of Gated DeltaNet (one decay per head) and Kimi Delta Attention (one per key channel)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from baton.kernels.recurrent_states import CHUNK, DeltaGates, States
from baton.kernels.reference.recurrence.chunks import Chunks
from baton.kernels.reference.recurrence.state_access import read_states, write_states

_NORM_EPS = 1e-6  # as in flash-linear-attention
_SUB_CHUNK = 16  # tokens between which decays per channel are computed pair by pair


class _Inputs(NamedTuple):
    query: Tensor  # [..., num_heads, key_dim], scaled
    key: Tensor  # [..., num_heads, key_dim]
    value: Tensor  # [..., num_heads, value_dim]
    log_decay: Tensor  # [..., num_heads, 1 or key_dim]
    decay: Tensor  # exp of it
    beta: Tensor  # [..., num_heads, 1]


def gated_delta_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gates: DeltaGates,
    states: States,
    cu_seqlens: Tensor,
    *,
    scale: float | None = None,
    normalize: bool = True,
    keep: Tensor | None = None,
) -> Tensor:
    """Computes S = exp(g) S + k beta (v - (exp(g) S)^T k)^T, out = scale S^T q, token by token; returns out.

    query and key [num_tokens, num_key_heads, key_dim], value and out [num_tokens, num_heads, value_dim]; each key head
    serves num_heads / num_key_heads consecutive heads. cu_seqlens [num_seqs + 1] int32. `scale` is key_dim^-0.5 by
    default; `normalize` divides queries and keys by their L2 norms. The states after the first keep [num_seqs] int32
    tokens are written, or, without it, after the last. A token's output does not depend on how sequences are cut.
    """
    num_heads, value_dim = value.shape[1:]
    states.pieces_per_head(num_heads, key.shape[2], value_dim)
    inputs = _prepare(query, key, value, gates, scale, normalize)
    state = read_states(states, num_heads)
    starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
    kept = lengths if keep is None else keep.long()
    final = state.clone()
    out = torch.empty_like(value)
    for index in range(int(lengths.max()) if len(lengths) else 0):
        seqs = (lengths > index).nonzero().flatten()
        tokens = starts[seqs] + index
        at = _Inputs(*(part[tokens] for part in inputs))
        decayed = state[seqs] * at.decay.unsqueeze(-1)
        change = (at.value - (decayed * at.key.unsqueeze(-1)).sum(-2)) * at.beta
        new = decayed + at.key.unsqueeze(-1) * change.unsqueeze(-2)
        state[seqs] = new
        out[tokens] = (new * at.query.unsqueeze(-1)).sum(-2).to(out.dtype)
        last = kept[seqs] == index + 1
        final[seqs[last]] = new[last]
    write_states(states, final)
    return out


def gated_delta_chunks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gates: DeltaGates,
    states: States,
    cu_seqlens: Tensor,
    *,
    scale: float | None = None,
    normalize: bool = True,
) -> Tensor:
    """Computes what `gated_delta_step` does in chunks of tokens, by the WY representation of Yang et al. (2024).

    Within a chunk with cumulative log decay G: T = (I + tril(beta k k^T exp(G_i - G_j), -1))^-1, U = T beta v,
    W = T beta k exp(G); new values V' = U - W S; out = scale (q exp(G) S + tril(q k^T exp(G_i - G_j)) V');
    S = exp(G_last) S + (k exp(G_last - G))^T V'. All in fp32.
    """
    num_heads, value_dim = value.shape[1:]
    states.pieces_per_head(num_heads, key.shape[2], value_dim)
    chunks = Chunks.of(cu_seqlens, CHUNK)
    at = _Inputs(*(chunks.split(part) for part in _prepare(query, key, value, gates, scale, normalize)))
    total = at.log_decay.cumsum(-2)  # non-increasing: every exponent below is at most 0
    unit = (_pair_scores(at.key * at.beta, at.key, total)).tril(-1)
    grown = total.exp()
    solved = torch.linalg.solve_triangular(
        unit, torch.cat((at.value * at.beta, at.key * at.beta * grown), -1), upper=False, unitriangular=True
    )
    values, weights = solved.split((value_dim, key.shape[2]), -1)
    inner = _pair_scores(at.query, at.key, total).tril()
    outer = at.query * grown
    last = total[..., -1:, :]
    key_out = (at.key * (last - total).exp()).transpose(-1, -2)
    shrink = last.exp().transpose(-1, -2)  # [num_chunks, num_heads, 1 or key_dim, 1]

    state = read_states(states, num_heads)
    out = torch.empty_like(values)
    for seqs, now in chunks.waves():
        before = state[seqs]
        new = values[now] - weights[now] @ before
        out[now] = outer[now] @ before + inner[now] @ new
        state[seqs] = before * shrink[now] + key_out[now] @ new
    write_states(states, state)
    return chunks.join(out).to(value.dtype)


def _prepare(
    query: Tensor, key: Tensor, value: Tensor, gates: DeltaGates, scale: float | None, normalize: bool
) -> _Inputs:
    """Returns the inputs in fp32, with gates, norms and scale applied, and keys and queries of each head."""
    group = value.shape[1] // key.shape[1]
    scale = key.shape[2] ** -0.5 if scale is None else scale
    query, key = query.float(), key.float()
    if normalize:
        query, key = (part * _inverse_norm(part) for part in (query, key))
    query, key = (part.repeat_interleave(group, 1) if group > 1 else part for part in (query * scale, key))
    # In fp64, because PyTorch rounds a function's last bit by the place of an element in its tensor.
    decay = gates.decay.double().view(*value.shape[:2], -1) + gates.bias.double().view(1, value.shape[1], -1)
    log_decay = -gates.log_rate.double().exp()[:, None] * functional.softplus(decay)
    beta = gates.beta.double().sigmoid().unsqueeze(-1)
    return _Inputs(query, key, value.float(), log_decay.float(), log_decay.exp().float(), beta.float())


def _inverse_norm(x: Tensor) -> Tensor:
    return torch.rsqrt(x.double().square().sum(-1, keepdim=True) + _NORM_EPS).float()


def _pair_scores(left: Tensor, right: Tensor, total: Tensor) -> Tensor:
    """Returns sum_c left_ic right_jc exp(total_ic - total_jc) for j <= i, and anything elsewhere.

    left and right [..., size, key_dim], total [..., size, 1 or key_dim] non-increasing.
    """
    size = left.shape[-2]
    if total.shape[-1] == 1:
        apart = (total - total.transpose(-1, -2)).clamp(max=0.0)
        return (left @ right.transpose(-1, -2)) * apart.exp()
    scores = left.new_zeros(*left.shape[:-1], size)
    for start in range(0, size, _SUB_CHUNK):
        rows = slice(start, start + _SUB_CHUNK)
        apart = (total[..., rows, None, :] - total[..., None, rows, :]).clamp(max=0.0).exp()
        scores[..., rows, rows] = (left[..., rows, None, :] * right[..., None, rows, :] * apart).sum(-1)
        if start:
            # Both exponents are at most 0 with this origin, so nothing overflows.
            origin = total[..., start : start + 1, :]
            shrunk = right[..., :start, :] * (origin - total[..., :start, :]).exp()
            grown = left[..., rows, :] * (total[..., rows, :] - origin).exp()
            scores[..., rows, :start] = grown @ shrunk.transpose(-1, -2)
    return scores
