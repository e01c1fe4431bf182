"""Ops of unquantized experts on a CPU whose result for a token does not depend on other tokens, bit for bit."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from baton.kernels.reference.activation.parts import by_parts
from baton.kernels.reference.linear.packed import packed_rows
from baton.kernels.reference.moe.experts import gated_by
from baton.kernels.reference.moe.groups import Groups
from baton.kernels.routing import Gate
from baton.worker.quantization.base import Params
from baton.worker.quantization.experts import ExpertsOps


class InvariantExpertsOps(ExpertsOps):
    """Multiplies the rows of each expert by oneDNN, and adds up a token's experts in the order of its choice."""

    def run(self, params: Params, x: Tensor, weights: Tensor, ids: Tensor, gate: Gate) -> Tensor:
        groups = Groups(ids)
        made = _products(groups, groups.rows(x), params, "gate_up")
        out = _products(groups, by_parts(partial(gated_by, gate=gate), made), params, "down")
        pairs = groups.unsorted(out).view(*ids.shape, -1)
        # A batched product sums in an order that depends on the number of tokens. These ops round each value alone.
        weighted = pairs.float() * weights.unsqueeze(-1)
        total = weighted[:, 0]
        for place in range(1, ids.shape[1]):
            total = total + weighted[:, place]
        return total.to(x.dtype)

    def product(self, params: Params, linear: str, rows: Tensor, ids: Tensor) -> Tensor:
        groups = Groups(ids)
        return groups.unsorted(_products(groups, groups.sorted(rows), params, linear))


def _products(groups: Groups, rows: Tensor, params: Params, linear: str) -> Tensor:
    """Returns each of the sorted rows times its expert's matrix of a linear, plus its bias."""
    matrices, biases = params[linear], params.get(f"{linear}_bias")
    out = torch.empty(len(rows), matrices.shape[1], dtype=rows.dtype)
    for expert, mine in groups.runs:
        out[mine] = packed_rows(rows[mine], matrices[expert], None if biases is None else biases[expert])
    return out
