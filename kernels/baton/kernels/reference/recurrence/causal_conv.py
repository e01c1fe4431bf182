"""Short causal depthwise convolution over each sequence, whose state is its last inputs."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from baton.kernels.recurrent_states import States
from baton.kernels.reference.recurrence.state_access import read_states, write_states


def causal_conv(
    x: Tensor,
    weight: Tensor,
    states: States,
    cu_seqlens: Tensor,
    *,
    bias: Tensor | None = None,
    silu: bool = True,
    keep: Tensor | None = None,
) -> Tensor:
    """Returns act(bias + sum_j weight[:, j] x[t - kernel_size + 1 + j]) of x [num_tokens, channels].

    weight [channels, kernel_size], bias [channels]; cu_seqlens [num_seqs + 1] int32 are the sequences' bounds in x.
    A state [kernel_size - 1, channels] holds inputs before the first token, oldest first, or zeros before a sequence.
    The states after the first keep [num_seqs] int32 tokens are written, or, without it, after the last.
    """
    history, (num_tokens, channels) = weight.shape[1] - 1, x.shape
    states.pieces_per_head(1, history, channels)
    starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
    seqs = torch.arange(len(starts), device=x.device)
    # Each sequence's inputs follow those of its state.
    begins = (starts + seqs * history)[:, None] + torch.arange(history, device=x.device)
    places = torch.arange(num_tokens, device=x.device) + torch.repeat_interleave(seqs, lengths) * history
    inputs = torch.empty(num_tokens + len(starts) * history, channels, device=x.device)
    inputs[begins] = read_states(states, 1)[:, 0]
    inputs[places + history] = x.float()
    out = torch.zeros_like(x, dtype=torch.float32) if bias is None else bias.float().expand(num_tokens, -1).clone()
    for tap in range(history + 1):
        out += inputs[places + tap] * weight[:, tap].float()
    kept = lengths if keep is None else keep.long()
    write_states(states, inputs[begins + kept[:, None]][:, None])
    # In fp64, because PyTorch rounds a function's last bit by the place of an element in its tensor.
    return (functional.silu(out.double()) if silu else out).to(x.dtype)
