"""Products of one token with weights of 4 bits on Hopper, which are bound by reading the weights."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from baton.kernels.overlap import overlaps
from baton.kernels.packed.four_bit_kernel import four_bit_kernel
from baton.kernels.packed.weight import PackedWeight
from baton.kernels.routing import Gate

PARTS = 8  # of tokens' vectors that the kernel multiplies at once
_BITS = 4
_STEP = 128  # columns, which share a scale
_FLOAT_GROUP = 32
_HOPPER = 9  # major version of the compute capability
_LONG, _FEW_ROWS = 8192, 4096


class FourBitTiling(NamedTuple):
    """The cut of the weight for one launch."""

    warps: int  # 2, 4, 8 or 16, of 2 rows of a tile each
    tiles: int  # 1 or 2 a program; 2: gates and ups, or twice the rows
    depth: int  # steps that are loaded ahead
    most_registers: int | None = None  # of a thread
    shared: bool = False  # steps are loaded to shared memory, not to registers
    ahead: int | None = None  # steps whose scales and zeros are loaded ahead, in registers; None: depth


def reads_four_bits(weight: PackedWeight, x: Tensor, k: int) -> bool:
    """Returns whether the kernel multiplies this weight with a token like x [.., k] on its device."""
    scale = weight.scale
    if not (x.is_cuda and x.dtype == torch.bfloat16 and _is_hopper(x.device.index)):
        return False
    if weight.bits != _BITS or scale is None or weight.row_scale is not None:
        return False
    if weight.numbers == "e2m1":
        return scale.dtype == torch.uint8 and weight.group == _FLOAT_GROUP and k % _FLOAT_GROUP == 0
    is_whole = weight.group > 0 and weight.group % _STEP == 0 and k % weight.group == 0
    has_order = weight.order is None or len(weight.order) == 1
    return weight.numbers == "words" and is_whole and has_order and weight.num_experts == 1


@cache
def _is_hopper(device_index: int) -> bool:
    return torch.cuda.get_device_capability(device_index)[0] == _HOPPER


def multiply_four_bits(
    out: Tensor,
    x: Tensor,
    weight: PackedWeight,
    tiling: FourBitTiling,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gate: Gate | None = None,
    residual: Tensor | None = None,
    ids: Tensor | None = None,
    shares: Tensor | None = None,
) -> Tensor:
    """Fills out with the product of x and the weight, or of the experts `ids` [num_tokens, top_k], and returns it.

    One of these: out [1, n] for x [1, k]; out [num_tokens * top_k, n] for x [num_tokens, k] and ids; out
    [num_tokens, n] for x [num_tokens * top_k, k], ids and the `shares` [num_tokens, top_k] of a token's sum, where
    top_k divides 8.

    `norm` [k] applies RMSNorm to x first; `gate` multiplies the two halves of the rows; `residual`, which may be `out`
    itself, is added last. Scales of e2m1 are from 2^-62 to 2^65.
    """
    n, k = out.shape[1], x.shape[1]
    overlap = overlaps(x)
    words, scale = weight.stored.view(torch.int32), weight.scale
    assert scale is not None, "reads_four_bits"
    top_k = 1 if ids is None else ids.shape[1]
    rows = 2 * tiling.warps * (1 if gate is not None else tiling.tiles)
    more = {} if tiling.most_registers is None else {"maxnreg": tiling.most_registers}
    four_bit_kernel[(triton.cdiv(n, rows), len(out))](
        out,
        x,
        words,
        scale,
        words if weight.zero is None else weight.zero,
        x if weight.bias is None else weight.bias,
        x if norm is None else norm,
        words if weight.order is None else weight.order,
        x if residual is None else residual,
        words if ids is None else ids,
        x if shares is None else shares,
        n,
        eps,
        0.0 if gate is None else gate.limit,
        0.0 if gate is None else gate.alpha,
        K=k,
        FLOATS=weight.numbers == "e2m1",
        NUM_GROUPS=scale.shape[1],
        GROUP=weight.group,
        ZEROED=weight.zero is not None,
        ZERO_PLUS=weight.zero_plus,
        BIASED=weight.bias is not None,
        NORM=norm is not None,
        ORDERED=weight.order is not None,
        GATED=gate is not None,
        CLAMPED=gate is not None and gate.limit > 0,
        RESIDUAL=residual is not None,
        EXPERTS=ids is not None,
        TOP_K=top_k,
        CHOICES=1 if shares is None else top_k,
        WORDS_STEP=words.numel(),
        SCALE_STEP=scale.numel(),
        WARPS=tiling.warps,
        TILES=2 if gate is not None else tiling.tiles,
        DEPTH=tiling.depth,
        OVERLAP=overlap,
        SHARED=tiling.shared,
        AHEAD=tiling.ahead or tiling.depth,
        num_warps=tiling.warps,
        launch_pdl=overlap,
        **more,
    )
    return out


def choose_four_bit_tiling(n: int, k: int, *, is_gated: bool) -> FourBitTiling:
    """Returns the fastest tiling in a search on an H200, for one weight of n rows or 2 n."""
    if is_gated:
        return FourBitTiling(4, 2, 3, shared=True)
    if k > _LONG:
        return FourBitTiling(8, 1, 4, shared=True)
    return FourBitTiling(8, 1, 2) if n <= _FEW_ROWS else FourBitTiling(4, 2, 2)
