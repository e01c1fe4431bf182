"""Products of pairs with their experts' matrices, neither gated nor summed: what adapters change is between them."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.kernels.moe.align import align
from baton.kernels.moe.experts import Rows, down_pairs, stack_of
from baton.kernels.moe.tiling import choose_tile
from baton.kernels.packed.weight import PackedWeight


def expert_products(rows: Tensor, ids: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None = None) -> Tensor:
    """Returns weight_e x + bias_e for each pair of ids [num_tokens, top_k] with its row x of `rows` [num_pairs, k].

    weight [num_experts, out, k], bias [num_experts, out]; [num_pairs, out] is returned.
    """
    stack, num_pairs = stack_of(weight, bias), ids.numel()
    aligned = align(ids, stack.num_experts, choose_tile(num_pairs, stack.num_experts, rows.dtype.itemsize))
    placed = rows.index_select(0, aligned.pairs.clamp(0, num_pairs - 1))
    whole = torch.ones(num_pairs, dtype=torch.float32, device=rows.device)
    return down_pairs(Rows(placed), aligned, whole, stack, rows.dtype)
