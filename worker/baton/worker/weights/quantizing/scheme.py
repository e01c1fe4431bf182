"""The interface of formats that weights are rounded to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor

from baton.rpc.errors import InvalidRequest
from baton.worker.weights.quantizing.table import SCHEMES


@dataclass(frozen=True, slots=True)
class Packed:
    """The tensors of a linear's part."""

    tensors: Mapping[str, Tensor]  # by the endings of their names, behind that of the linear
    weight: Tensor  # that they mean, [out, in] fp32


class Scheme(ABC):
    """A format that one call of `pack` rounds a matrix to."""

    packs_stacks: ClassVar[bool] = False  # stacks of transposed experts, and no linears

    def __init__(self, name: str, group: int) -> None:
        """`group`: columns that share a scale; 0 where the format has no choice of them."""
        self.name = name
        self.group = group

    @abstractmethod
    def settings(self, left_out: Sequence[str]) -> dict[str, Any]:
        """Returns the quantization_config. `left_out`: names of linears that stay as they are."""

    @abstractmethod
    def pack(self, weight: Tensor, dtype: torch.dtype, largest: float) -> Packed:
        """Rounds the weight of one part, [out, in] fp32.

        `dtype`: of the unquantized weight, which scales have where the format allows it. `largest`: the largest
        magnitude of all parts of the linear, which are multiplied as one matrix.
        """


def scheme_of(name: str, group_size: int | None = None) -> Scheme:
    """Returns a format by the value of --format. Raises InvalidRequest for an unknown one, or another group size."""
    row = SCHEMES.get(name)
    if row is None:
        raise InvalidRequest(f"format={name}: it must be one of {', '.join(SCHEMES)}", field="format")
    if group_size is None:
        group_size = row.group_size
    elif not row.group_size:
        choices = ", ".join(one.name for one in SCHEMES.values() if one.group_size)
        raise InvalidRequest(
            f"group_size={group_size}: {name} has no choice of it ({row.summary}); leave it out, or give one of the "
            f"formats {choices}",
            field="group_size",
        )
    elif group_size < 1:
        raise InvalidRequest(f"group_size={group_size}: it must be a positive integer", field="group_size")
    scheme: Scheme = import_module(f"baton.worker.weights.quantizing.{row.module}").scheme(name, group_size)
    return scheme
