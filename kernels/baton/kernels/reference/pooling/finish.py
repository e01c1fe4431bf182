"""The last op of a pooler: embeddings of length 1, or probabilities of classes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from baton.kernels.pooling_spec import SMALLEST_NORM, Activation


def finish_vectors(x: Tensor, asked: Tensor, activation: Activation) -> Tensor:
    """Returns the activation of x [num_vectors, width] as fp32.

    asked [2, num_vectors] int64: the number of first values that are kept, the others become 0; and 1 where the
    activation applies, else 0.
    """
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for index, (kept, applies) in enumerate(asked.t().tolist()):
        vector = x[index, :kept].float()
        out[index, :kept] = _activated(vector, activation) if applies else vector
    return out


def _activated(vector: Tensor, activation: Activation) -> Tensor:
    match activation:
        case "normalize":
            return functional.normalize(vector, dim=0, eps=SMALLEST_NORM)
        case "sigmoid":
            return vector.sigmoid()
        case "softmax":
            return vector.softmax(0)
        case _:
            return vector
