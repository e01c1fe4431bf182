"""Buckets of distances between tokens, for which attention adds learned scores."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_MAX_DISTANCE = 128  # from which on all distances share the last bucket of their side


def distance_buckets(num_buckets: int, num_positions: int) -> Tensor:
    """Returns [2 num_positions - 1] int32: the bucket of a key at j for a query at i, at j - i + num_positions - 1.

    Half of the buckets are for later keys. Of each side half are for one distance each; the others grow.
    """
    behind = -torch.arange(1 - num_positions, num_positions)
    side = num_buckets // 2
    exact = side // 2
    distance = behind.abs()
    growth = torch.log(distance.float() / exact) / math.log(_MAX_DISTANCE / exact) * (side - exact)
    far = (exact + growth.clamp(min=0).long()).clamp(max=side - 1)
    return ((behind < 0).long() * side + torch.where(distance < exact, distance, far)).int()
