"""The names, types and shapes of the tensors of one transfer, as both ends compare them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from baton.llm.parameters.names import InvalidParameter

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_LISTS = ("names", "dtype_names", "shapes")


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """One tensor of a transfer."""

    name: str
    dtype_name: str  # as torch spells it, such as bfloat16
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} of {self.dtype_name} {list(self.shape)}"

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> Self:
        """Describes a tensor."""
        return cls(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))

    def empty(self, device: torch.device) -> Tensor:
        """Returns memory for the tensor. Raises InvalidParameter for an unknown type."""
        import torch

        dtype = getattr(torch, self.dtype_name, None)
        if not isinstance(dtype, torch.dtype):
            raise InvalidParameter(f"{self.name}: torch has no dtype {self.dtype_name!r}", field="dtype_names")
        return torch.empty(self.shape, dtype=dtype, device=device)


def facts_of(info: Mapping[str, Any]) -> list[TensorFacts] | None:
    """Reads the lists of vLLM's update_info; None if it has none. Raises InvalidParameter."""
    given = {name: info[name] for name in _LISTS if info.get(name) is not None}
    if not given:
        return None
    if missing := [name for name in _LISTS if name not in given]:
        raise InvalidParameter(f"update_info lacks {' and '.join(missing)}; give all three or none", field=missing[0])
    for name, value in given.items():
        if isinstance(value, str | bytes) or not isinstance(value, Sequence):
            raise InvalidParameter(f"{name} is of type {type(value).__name__}; give a list", field=name)
    lengths = {name: len(value) for name, value in given.items()}
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{count} {name}" for name, count in lengths.items())
        raise InvalidParameter(f"update_info has {counts}; give one of each for every tensor", field="names")
    try:
        return [
            TensorFacts(str(name), str(dtype).removeprefix("torch."), tuple(int(size) for size in shape))
            for name, dtype, shape in zip(*(given[name] for name in _LISTS), strict=True)
        ]
    except (TypeError, ValueError) as error:
        raise InvalidParameter(f"shapes: {error}; give a list of numbers for every tensor", field="shapes") from None


def difference(sent: Sequence[TensorFacts], expected: Sequence[TensorFacts]) -> str:
    """Returns the first difference in words; empty if there is none."""
    for place, (one, other) in enumerate(zip(sent, expected, strict=False)):
        if one != other:
            return f"tensor {place} is {one}, and update_info has {other}"
    if len(sent) != len(expected):
        return f"the trainer sends {len(sent)} tensors, and update_info has {len(expected)}"
    return ""


def encoded(facts: Iterable[TensorFacts]) -> str:
    """Writes the facts as JSON."""
    return json.dumps([[one.name, one.dtype_name, one.shape] for one in facts])


def decoded(text: str | bytes) -> list[TensorFacts]:
    """Reads what `encoded` wrote."""
    return [TensorFacts(name, dtype_name, tuple(shape)) for name, dtype_name, shape in json.loads(text)]
