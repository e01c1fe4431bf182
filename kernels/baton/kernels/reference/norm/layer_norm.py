"""LayerNorm, with the addition to the residual."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    residual: Tensor | None = None,
    keep_sum: bool = True,
) -> Tensor:
    """Returns LayerNorm of x [num_rows, size]. With `residual`, adds x to it and returns the norm of the sum.

    weight [size], or [k, size], whose row r % k belongs to row r of x; bias [size]. Without `keep_sum`, the values of
    `residual` are undefined afterwards, which saves a write.
    """
    if residual is not None:
        x = residual.add_(x)
    size = (x.shape[-1],)
    if weight.dim() == 1:
        return functional.layer_norm(x, size, weight, bias, eps)
    normed = functional.layer_norm(x.float(), size, eps=eps).view(-1, *weight.shape) * weight.float()
    if bias is not None:
        normed += bias.float()
    return normed.view(x.shape).to(x.dtype)
