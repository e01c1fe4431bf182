"""The last op of a pooler: embeddings of length 1, or probabilities of classes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.pooling_spec import ACTIVATIONS, SMALLEST_NORM, Activation

_NORMALIZE = tl.constexpr(ACTIVATIONS.index("normalize"))
_SIGMOID = tl.constexpr(ACTIVATIONS.index("sigmoid"))
_SOFTMAX = tl.constexpr(ACTIVATIONS.index("softmax"))


@triton.jit(do_not_specialize_on_alignment=["asked_ptr"])
def _finish_kernel(
    out_ptr,  # [num_vectors, width] fp32
    x_ptr,  # [num_vectors, width]
    asked_ptr,  # [2, num_vectors] int64: values that are kept, 1 if the activation applies
    width,
    smallest,
    ACTIVATION: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
):
    """out = activation of the first values of x; zeros behind them"""
    # grid: (num_vectors)
    vector = tl.program_id(0)
    kept = tl.load(asked_ptr + vector)
    applies = tl.load(asked_ptr + tl.num_programs(0) + vector) != 0
    dims = tl.arange(0, WIDTH_PAD)
    at = vector.to(tl.int64) * width + dims
    inside = dims < kept
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    found = x
    if ACTIVATION == _NORMALIZE:
        found = x / tl.maximum(tl.sqrt(tl.sum(x * x, 0)), smallest)
    elif ACTIVATION == _SIGMOID:
        power = tl.exp(-tl.abs(x))
        found = tl.where(x >= 0, 1.0, power) / (1 + power)
    elif ACTIVATION == _SOFTMAX:
        powers = tl.where(inside, tl.exp(x - tl.max(tl.where(inside, x, float("-inf")), 0)), 0.0)
        found = powers / tl.sum(powers, 0)
    found = tl.where(applies, found, x)
    tl.store(out_ptr + at, tl.where(inside, found, 0.0), mask=dims < width)


def finish_vectors(x: Tensor, asked: Tensor, activation: Activation) -> Tensor:
    """Returns the activation of x [num_vectors, width] as fp32.

    asked [2, num_vectors] int64: the number of first values that are kept, the others become 0; and 1 where the
    activation applies, else 0.
    """
    num_vectors, width = x.shape
    out = torch.empty(num_vectors, width, dtype=torch.float32, device=x.device)
    _finish_kernel[(num_vectors,)](
        out,
        x,
        asked,
        width,
        SMALLEST_NORM,
        ACTIVATION=ACTIVATIONS.index(activation),
        WIDTH_PAD=triton.next_power_of_2(width),
        num_warps=4 if width <= 4096 else 8,
    )
    return out
