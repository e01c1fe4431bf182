"""The parameters of all experts in stacks: those of one, and their reading from stacks in the checkpoint."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.rpc.errors import InvalidRequest
from baton.worker.quantization.base import Params, Source


class StackedSource:
    """Collects what each expert asks for under the same name, and asks for the stacks."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._views: dict[str, tuple[tuple[int, ...], list[Tensor]]] = {}

    def __call__(self, name: str, shape: tuple[int, ...], into: Tensor) -> None:
        self._views.setdefault(name, (shape, []))[1].append(into)

    def run(self) -> None:
        """Asks for the stacks. Raises InvalidRequest for a format that reads numbers beside the parameters."""
        for name, (shape, views) in self._views.items():
            self._source(name, (len(views), *shape), _stack_of(name, views))


def _stack_of(name: str, views: list[Tensor]) -> Tensor:
    """Returns the tensor whose entries the views are."""
    first = views[0]
    offsets = [view.storage_offset() for view in views]
    step = offsets[1] - offsets[0] if len(views) > 1 else first.numel()
    even = all(offset == offsets[0] + index * step for index, offset in enumerate(offsets))
    if not even or step < first.numel():
        raise InvalidRequest(
            f"{name}: experts in one tensor are not read in this format; a checkpoint that names each expert's linears "
            "is",
            field="model",
        )
    return torch.as_strided(first, (len(views), *first.shape), (step, *first.stride()), offsets[0])


def expert_of(params: Params, linear: str, expert: int) -> Params:
    """Returns the parameters of one linear of one expert."""
    prefix = f"{linear}."
    return {name.removeprefix(prefix): stack[expert] for name, stack in params.items() if name.startswith(prefix)}
