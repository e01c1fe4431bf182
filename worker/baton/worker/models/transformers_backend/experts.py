"""Baton's experts on a CPU under Transformers' experts interface."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from baton.kernels.reference.moe.groups import Groups

EXPERTS = "baton"  # the name in Transformers


def register() -> None:
    """Gives Transformers the experts. Idempotent."""
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(EXPERTS, _run)


def _run(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Implements Transformers' experts interface: returns the weighted sum of each token's experts."""
    groups = Groups(top_k_index)
    rows = groups.rows(hidden_states)
    if module.has_gate:
        inner = module._apply_gate(_products(groups, rows, module, "gate_up_proj"))
    else:
        inner = module.act_fn(_products(groups, rows, module, "up_proj"))
    out = _products(groups, inner, module, "down_proj")
    if getattr(module, "has_post_expert_norm", False):  # older versions have none
        out = module.post_expert_norm(out)
    return groups.sums(out, top_k_weights).to(hidden_states.dtype)


def _products(groups: Groups, rows: Tensor, module: Any, name: str) -> Tensor:
    matrices = getattr(module, name)
    bias = getattr(module, f"{name}_bias") if module.has_bias else None
    return groups.products(rows, matrices.mT if module.is_transposed else matrices, bias)
