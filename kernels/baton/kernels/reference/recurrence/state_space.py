"""The state-space recurrence of Mamba-2."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from baton.kernels.recurrent_states import CHUNK, States, StepSizes
from baton.kernels.reference.recurrence.chunks import Chunks
from baton.kernels.reference.recurrence.state_access import read_states, write_states


class _Inputs(NamedTuple):
    read: Tensor  # [..., num_heads, state_size]: C
    key: Tensor  # [..., num_heads, state_size]: B
    value: Tensor  # [..., num_heads, head_dim]: dt x
    log_decay: Tensor  # [..., num_heads, 1]
    decay: Tensor  # exp of it


def state_space_step(
    x: Tensor,
    b: Tensor,
    c: Tensor,
    sizes: StepSizes,
    skip: Tensor | None,
    states: States,
    cu_seqlens: Tensor,
    *,
    keep: Tensor | None = None,
) -> Tensor:
    """Computes S = exp(log decay) S + B (dt x)^T, out = S^T C + skip x, token by token; returns out.

    x and out [num_tokens, num_heads, head_dim]; b and c [num_tokens, num_groups, state_size], each for num_heads /
    num_groups consecutive heads; skip [num_heads] (`D` of checkpoints). States are [state_size, head_dim].
    cu_seqlens [num_seqs + 1] int32. The states after the first keep [num_seqs] int32 tokens are written, or, without
    it, after the last. A token's output does not depend on how sequences are cut.
    """
    num_heads, head_dim = x.shape[1:]
    states.pieces_per_head(num_heads, b.shape[2], head_dim)
    inputs = _prepare(x, b, c, sizes)
    state = read_states(states, num_heads)
    starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
    kept = lengths if keep is None else keep.long()
    final = state.clone()
    out = torch.empty_like(inputs.value)
    for index in range(int(lengths.max()) if len(lengths) else 0):
        seqs = (lengths > index).nonzero().flatten()
        tokens = starts[seqs] + index
        at = _Inputs(*(part[tokens] for part in inputs))
        new = state[seqs] * at.decay.unsqueeze(-1) + at.key.unsqueeze(-1) * at.value.unsqueeze(-2)
        state[seqs] = new
        out[tokens] = (new * at.read.unsqueeze(-1)).sum(-2)
        last = kept[seqs] == index + 1
        final[seqs[last]] = new[last]
    write_states(states, final)
    return _add_skip(out, x, skip)


def state_space_chunks(
    x: Tensor,
    b: Tensor,
    c: Tensor,
    sizes: StepSizes,
    skip: Tensor | None,
    states: States,
    cu_seqlens: Tensor,
) -> Tensor:
    """Computes what `state_space_step` does in chunks of tokens, by the duality of Dao and Gu (2024).

    Within a chunk with cumulative log decay G: out = C exp(G) S + tril(C B^T exp(G_i - G_j)) dt x;
    S = exp(G_last) S + (B exp(G_last - G))^T dt x. All in fp32.
    """
    num_heads, head_dim = x.shape[1:]
    states.pieces_per_head(num_heads, b.shape[2], head_dim)
    chunks = Chunks.of(cu_seqlens, CHUNK)
    at = _Inputs(*(chunks.split(part) for part in _prepare(x, b, c, sizes)))
    total = at.log_decay.cumsum(-2)  # non-increasing: every exponent below is at most 0
    apart = (total - total.transpose(-1, -2)).clamp(max=0.0)
    out = ((at.read @ at.key.transpose(-1, -2)) * apart.exp()).tril() @ at.value
    last = total[..., -1:, :]
    added = (at.key * (last - total).exp()).transpose(-1, -2) @ at.value
    outer = at.read * total.exp()
    shrink = last.exp()

    state = read_states(states, num_heads)
    for seqs, now in chunks.waves():
        before = state[seqs]
        out[now] += outer[now] @ before
        state[seqs] = before * shrink[now] + added[now]
    write_states(states, state)
    return _add_skip(chunks.join(out), x, skip)


def _prepare(x: Tensor, b: Tensor, c: Tensor, sizes: StepSizes) -> _Inputs:
    """Returns the inputs in fp32, with step sizes applied, and B and C of each head."""
    group = x.shape[1] // b.shape[1]
    key, read = (part.float().repeat_interleave(group, 1) if group > 1 else part.float() for part in (b, c))
    # In fp64, because PyTorch rounds a function's last bit by the place of an element in its tensor.
    step = functional.softplus(sizes.step.double() + sizes.bias.double()).clamp(*sizes.limits).unsqueeze(-1)
    log_decay = -sizes.log_rate.double().exp()[:, None] * step
    return _Inputs(read, key, x.float() * step.float(), log_decay.float(), log_decay.exp().float())


def _add_skip(out: Tensor, x: Tensor, skip: Tensor | None) -> Tensor:
    if skip is not None:
        out = out + x.float() * skip.float()[:, None]
    return out.to(x.dtype)
