"""Integers with a scale, and perhaps a zero, for each group of a row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from baton.worker.weights.quantizing import numbers


@dataclass(frozen=True, slots=True)
class Integers:
    """w = (stored - zero) * scale of the group"""

    stored: Tensor  # [rows, columns] from 0
    scale: Tensor  # [rows, groups] fp32, of values that the wanted type has
    zero: Tensor  # [rows, groups]

    @property
    def weight(self) -> Tensor:
        """The weight that they mean."""
        group = self.stored.shape[1] // self.scale.shape[1]
        values = numbers.grouped(self.stored, group) - self.zero.unsqueeze(2)
        return (values * self.scale.unsqueeze(2)).flatten(1)


def symmetric(weight: Tensor, bits: int, group: int, dtype: torch.dtype) -> Integers:
    """Rounds to integers around the middle of their range. `dtype`: of the scales."""
    values = numbers.grouped(weight, group)
    most, middle = (1 << bits) - 1, 1 << (bits - 1)
    scale = numbers.scale_of(values.abs().amax(2, keepdim=True), most / 2, dtype)
    stored = numbers.rounded(values, scale, 0, most, middle)
    return Integers(stored.flatten(1), scale.squeeze(2), torch.full(scale.shape[:2], float(middle)))


def with_zeros(weight: Tensor, bits: int, group: int, dtype: torch.dtype) -> Integers:
    """Rounds to integers from each group's smallest value, or 0, to its largest, or 0."""
    values = numbers.grouped(weight, group)
    most = (1 << bits) - 1
    low, high = values.amin(2, keepdim=True).clamp_max(0), values.amax(2, keepdim=True).clamp_min(0)
    scale = numbers.scale_of(high - low, most, dtype)
    zero = numbers.rounded(-low, scale, 0, most)
    stored = numbers.rounded(values, scale, 0, most, zero)
    return Integers(stored.flatten(1), scale.squeeze(2), zero.squeeze(2))
