"""The experts of a mixture: tokens are sorted by expert, with one product for each expert that has tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from baton.kernels.routing import Gate

# Up to so many rows, BLAS reads a matrix twice as fast as the left operand.
_FEW_ROWS = 8


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
    """
    num_tokens, top_k = ids.shape
    experts, order = ids.flatten().sort(stable=True)
    hit, counts = experts.unique_consecutive(return_counts=True)
    groups = list(zip(hit.tolist(), counts.tolist(), strict=True))
    rows = x.index_select(0, order.div(top_k, rounding_mode="floor"))
    gated = gated_by(_products(rows, gate_up, gate_up_bias, experts, groups), gate)
    out = _products(gated, down, down_bias, experts, groups)
    # Sums over a token's experts are in the order of its choice, independent of other tokens.
    pairs = torch.empty_like(out).index_copy_(0, order, out).view(num_tokens, top_k, -1)
    return torch.bmm(weights.to(out.dtype).unsqueeze(1), pairs).squeeze(1)


def gated_by(gate_up: Tensor, gate: Gate) -> Tensor:
    """Returns the gated ups of gate_up [num_rows, 2 size]."""
    gates, ups = gate_up.chunk(2, dim=-1)
    if not gate.limit:
        return functional.silu(gates).mul_(ups)
    gates, ups = gates.clamp(max=gate.limit), ups.clamp(-gate.limit, gate.limit)
    return gates * torch.sigmoid(gates * gate.alpha) * (ups + 1)


def _products(
    rows: Tensor, stack: Tensor, bias: Tensor | None, experts: Tensor, groups: list[tuple[int, int]]
) -> Tensor:
    """Returns each row times its expert's matrix, plus its bias. Rows are sorted by expert."""
    out = torch.empty(len(rows), stack.shape[1], dtype=rows.dtype, device=rows.device)
    for expert, mine in _runs(groups):
        if rows.dtype == torch.float32 and 1 < mine.stop - mine.start <= _FEW_ROWS:
            out[mine] = torch.mm(stack[expert], rows[mine].t()).t()
        else:
            torch.mm(rows[mine], stack[expert].t(), out=out[mine])
    return out if bias is None else out.add_(bias.index_select(0, experts))


def _runs(groups: list[tuple[int, int]]) -> Iterator[tuple[int, slice]]:
    start = 0
    for expert, count in groups:
        yield expert, slice(start, start + count)
        start += count
