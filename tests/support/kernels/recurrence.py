"""Recurrent states in pools with invalid values around them, random inputs, and token-by-token loops in fp64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from baton.kernels.recurrent_states import DeltaGates, States, StepSizes
from baton.kernels.reference.recurrence.state_access import read_states

WILD = 1e4  # value of the pool's pieces that no sequence reads


def make_states(
    num_seqs: int,
    num_heads: int,
    rows: int,
    columns: int,
    *,
    pieces: int = 1,
    fresh: Sequence[int] = (),
    dropped: Sequence[int] = (),
    in_place: bool = False,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> States:
    """Returns states of which the `fresh` sequences begin with zeros and the `dropped` are not written."""
    count = num_seqs * num_heads * pieces
    order = torch.randperm(2 * count + 3).int()
    read = order[:count].view(num_seqs, -1).clone()
    write = read.clone() if in_place else order[count : 2 * count].view(num_seqs, -1).clone()
    pool = torch.randn(2 * count + 3, rows, columns // pieces)
    unread = torch.ones(len(pool), dtype=torch.bool)
    unread[read.flatten().long()] = False
    pool[unread] = WILD
    read[list(fresh)] = -1
    write[list(dropped)] = -1
    return States(pool.to(dtype).to(device), read.to(device), write.to(device))


def written(states: States, num_heads: int) -> Tensor:
    """Returns the final states [num_seqs, num_heads, rows, columns], zero where dropped."""
    return read_states(States(states.pool, states.write, states.write), num_heads)


def bounds_of(lengths: Sequence[int], device: str = "cpu") -> Tensor:
    """Returns cu_seqlens [num_seqs + 1] int32."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def random_delta(
    num_tokens: int,
    num_key_heads: int,
    num_heads: int,
    key_dim: int,
    value_dim: int,
    *,
    per_channel: bool,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, Tensor, DeltaGates]:
    """Returns queries, keys, values and gates; some decays are strong enough to overflow a naive inverse."""
    mixed = torch.randn(num_tokens, 2 * num_key_heads * key_dim + num_heads * value_dim).to(device, dtype)
    sizes = (num_key_heads * key_dim, num_key_heads * key_dim, num_heads * value_dim)
    query, key, value = mixed.split(sizes, -1)
    channels = (key_dim,) if per_channel else ()
    gates = DeltaGates(
        (2 * torch.randn(num_tokens, num_heads, *channels)).to(device, dtype),
        torch.randn(num_tokens, num_heads).to(device, dtype),
        torch.linspace(-4.0, 2.5, num_heads, device=device),
        torch.randn(num_heads, *channels, device=device),
    )
    heads = (query.unflatten(1, (num_key_heads, -1)), key.unflatten(1, (num_key_heads, -1)))
    return *heads, value.unflatten(1, (num_heads, -1)), gates


def random_state_space(
    num_tokens: int,
    num_groups: int,
    num_heads: int,
    state_size: int,
    head_dim: int,
    *,
    limits: tuple[float, float] = (0.0, float("inf")),
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, Tensor, StepSizes, Tensor]:
    """Returns x, B, C, step sizes and skips."""
    mixed = torch.randn(num_tokens, num_heads * head_dim + 2 * num_groups * state_size).to(device, dtype)
    x, b, c = mixed.split((num_heads * head_dim, num_groups * state_size, num_groups * state_size), -1)
    sizes = StepSizes(
        torch.randn(num_tokens, num_heads).to(device, dtype),
        torch.linspace(-3.0, 2.5, num_heads, device=device),
        torch.randn(num_heads, device=device),
        limits,
    )
    parts = (x.unflatten(1, (num_heads, -1)), b.unflatten(1, (num_groups, -1)), c.unflatten(1, (num_groups, -1)))
    return *parts, sizes, torch.randn(num_heads, device=device)


def part_of(value: Any, tokens: slice) -> Any:
    """Returns the tokens of a tensor, of gates or of step sizes."""
    if isinstance(value, DeltaGates):
        return DeltaGates(value.decay[tokens], value.beta[tokens], value.log_rate, value.bias)
    if isinstance(value, StepSizes):
        return StepSizes(value.step[tokens], value.log_rate, value.bias, value.limits)
    return value[tokens]


def on_cpu(value: Any) -> Any:
    """Returns a tensor, gates or step sizes on the CPU."""
    if isinstance(value, DeltaGates | StepSizes):
        moved = {
            name: on_cpu(getattr(value, name)) for name in value.__slots__ if isinstance(getattr(value, name), Tensor)
        }
        return replace(value, **moved)
    return value.cpu() if isinstance(value, Tensor) else value


def naive_delta(
    query: Tensor, key: Tensor, value: Tensor, gates: DeltaGates, initial: Tensor, bounds: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Returns outputs, and each sequence's states [length + 1, num_heads, key_dim, value_dim], one head at a time."""
    out = torch.zeros_like(value, dtype=torch.float64)
    histories = []
    group = value.shape[1] // key.shape[1]
    for seq, (start, end) in enumerate(pairwise(bounds.tolist())):
        history = [initial[seq].double()]
        for token in range(start, end):
            states = []
            for head in range(value.shape[1]):
                k = key[token, head // group].double()
                q = query[token, head // group].double()
                k = k / (k.square().sum() + 1e-6).sqrt()
                q = q / (q.square().sum() + 1e-6).sqrt() / len(q) ** 0.5
                rate = gates.log_rate[head].double().exp()
                log_decay = -rate * functional.softplus(gates.decay[token, head].double() + gates.bias[head].double())
                decayed = history[-1][head] * log_decay.exp().reshape(-1, 1)
                beta = gates.beta[token, head].double().sigmoid()
                state = decayed + torch.outer(k, beta * (value[token, head].double() - decayed.T @ k))
                out[token, head] = state.T @ q
                states.append(state)
            history.append(torch.stack(states))
        histories.append(torch.stack(history))
    return out, histories


def naive_state_space(
    x: Tensor, b: Tensor, c: Tensor, sizes: StepSizes, skip: Tensor | None, initial: Tensor, bounds: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Returns outputs, and each sequence's states [length + 1, num_heads, state_size, head_dim]."""
    out = torch.zeros_like(x, dtype=torch.float64)
    histories = []
    group = x.shape[1] // b.shape[1]
    for seq, (start, end) in enumerate(pairwise(bounds.tolist())):
        history = [initial[seq].double()]
        for token in range(start, end):
            states = []
            for head in range(x.shape[1]):
                step = functional.softplus(sizes.step[token, head].double() + sizes.bias[head].double())
                step = step.clamp(*sizes.limits)
                value = x[token, head].double()
                decay = (-sizes.log_rate[head].double().exp() * step).exp()
                state = decay * history[-1][head] + torch.outer(b[token, head // group].double(), step * value)
                out[token, head] = state.T @ c[token, head // group].double()
                if skip is not None:
                    out[token, head] += skip[head].double() * value
                states.append(state)
            history.append(torch.stack(states))
        histories.append(torch.stack(history))
    return out, histories


def naive_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, initial: Tensor, bounds: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Returns outputs, and each sequence's states [length + 1, kernel_size - 1, channels]."""
    out = torch.zeros_like(x, dtype=torch.float64)
    histories = []
    for seq, (start, end) in enumerate(pairwise(bounds.tolist())):
        history = [initial[seq].double()]
        for token in range(start, end):
            seen = torch.cat((history[-1], x[token : token + 1].double()))
            summed = (seen * weight.double().T).sum(0)
            summed = summed if bias is None else summed + bias.double()
            out[token] = functional.silu(summed) if silu else summed
            history.append(seen[1:])
        histories.append(torch.stack(history))
    return out, histories


def states_after(histories: Sequence[Tensor], kept: Sequence[int] | None = None) -> Tensor:
    """Returns each sequence's state after its last token, or after the first `kept`."""
    counts = kept if kept is not None else [len(history) - 1 for history in histories]
    return torch.stack([history[count] for history, count in zip(histories, counts, strict=True)])
