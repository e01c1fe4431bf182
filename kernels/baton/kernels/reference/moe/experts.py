"""The experts of a mixture: tokens are sorted by expert, with one product for each expert that has tokens."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from baton.kernels.reference.moe.groups import Groups
from baton.kernels.routing import Gate


def run_experts(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate: Gate,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """Returns the weighted sum of each token's experts, [num_tokens, hidden_size].

    x [num_tokens, hidden_size], weights and ids [num_tokens, top_k], gate_up [num_experts, 2 size, hidden_size] with
    gates first, down [num_experts, hidden_size, size]; biases [num_experts, 2 size] and [num_experts, hidden_size].
    Without gates, gate_up and its bias have `size` rows an expert.
    """
    groups = Groups(ids)
    gated = gated_by(groups.products(groups.rows(x), gate_up, gate_up_bias), gate)
    return groups.sums(groups.products(gated, down, down_bias), weights)


def gated_by(gate_up: Tensor, gate: Gate) -> Tensor:
    """Returns the gated ups of gate_up [num_rows, 2 size], or the squared ones of [num_rows, size]."""
    if gate.squares:
        return functional.relu(gate_up).square_()
    gates, ups = gate_up.chunk(2, dim=-1)
    if not gate.limit:
        return functional.silu(gates).mul_(ups)
    gates, ups = gates.clamp(max=gate.limit), ups.clamp(-gate.limit, gate.limit)
    return gates * torch.sigmoid(gates * gate.alpha) * (ups + 1)
