"""RMSNorm over groups of features, multiplied by an activated gate before or after."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

GateKind = Literal["silu", "sigmoid"]


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    *,
    group_size: int,
    norm_first: bool,
    activation: GateKind = "silu",
) -> Tensor:
    """Returns RMSNorm(x) weight act(gate), or, without `norm_first`, RMSNorm(x act(gate)) weight, of [num_rows, size].

    The mean of squares is that of each `group_size` consecutive features. weight [size], or [group_size] of each.
    """
    # In fp64, because PyTorch rounds a function's last bit by the place of an element in its tensor.
    wide_gate = gate.double()
    opened = (functional.silu(wide_gate) if activation == "silu" else wide_gate.sigmoid()).float()
    wide = x.float() if norm_first else x.float() * opened
    groups = wide.reshape(x.shape[0], -1, group_size)
    normed = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)
    scaled = (normed * weight.float().view(-1, group_size)).view(x.shape)
    return (scaled * opened if norm_first else scaled).to(x.dtype)
