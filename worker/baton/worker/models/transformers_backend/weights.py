"""The tensors of a model of Transformers: parameters, buffers, and other tensors that its modules keep."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor, nn

from baton.worker.layers.tree import mapped, tensors_of


class Place(NamedTuple):
    """Where a model keeps a tensor."""

    module: str
    attribute: str


@dataclass(frozen=True, slots=True)
class TransformersWeights:
    """A model, and tensors for it, which it may not hold yet. Tied ones are one tensor."""

    module: nn.Module
    tensors_at: Mapping[Place, Tensor]

    @classmethod
    def of(cls, module: nn.Module) -> TransformersWeights:
        """Returns the tensors that a model holds."""
        module.requires_grad_(requires_grad=False)
        return cls(
            module,
            {
                Place(name, attribute): tensor
                for name, part in module.named_modules()
                for attribute, tensor in _tensors_in(part).items()
            },
        )

    @property
    def num_bytes(self) -> int:
        """Size of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def tensors(self) -> list[Tensor]:
        """Returns each tensor once, in an order that is the same for all models of one architecture."""
        return tensors_of(self.tensors_at)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> TransformersWeights:
        """Returns weights with `change` applied to each tensor, once to a shared one. Leaves the model as it is."""
        return replace(self, tensors_at=mapped(self.tensors_at, change))

    def install(self) -> None:
        """Gives the model these tensors."""
        parameters: dict[int, nn.Parameter] = {}
        for place, tensor in self.tensors_at.items():
            part = self.module.get_submodule(place.module)
            if place.attribute in part._parameters:
                parameters.setdefault(id(tensor), nn.Parameter(tensor, requires_grad=False))
                part._parameters[place.attribute] = parameters[id(tensor)]
            elif place.attribute in part._buffers:
                part._buffers[place.attribute] = tensor
            else:
                part.__dict__[place.attribute] = tensor


def _tensors_in(part: nn.Module) -> dict[str, Tensor]:
    """Returns the tensors of a module itself, without those of the modules in it."""
    held = {**part._parameters, **part._buffers, **vars(part)}
    return {name: value for name, value in held.items() if isinstance(value, Tensor)}
