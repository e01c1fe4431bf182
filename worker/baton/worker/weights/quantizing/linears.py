"""The linears of a model by the names of their tensors, as its family states them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from baton.rpc.errors import InvalidRequest
from baton.worker.models.config import ModelConfig, WeightsInFormat
from baton.worker.quantization.base import LinearShape, QuantMethod
from baton.worker.quantization.experts import ExpertsMethod, ExpertsShape
from baton.worker.quantization.formats.modules import Modules
from baton.worker.quantization.quantized.experts import linears_of
from baton.worker.quantization.registry import UNQUANTIZED, UNQUANTIZED_EXPERTS
from baton.worker.quantization.weight_format import WeightFormat
from baton.worker.weights.build import build_weights

_META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class Stack:
    """The matrices of all experts of a layer, which the checkpoint keeps transposed in one tensor."""

    name: str
    num_experts: int
    rows: int
    columns: int


class _Listed(WeightFormat):
    """Lists what a model asks for."""

    covers_experts = True

    def __init__(self) -> None:
        super().__init__({})
        self.linears: list[LinearShape] = []
        self.experts: list[ExpertsShape] = []

    def method_of(self, shape: LinearShape) -> QuantMethod:
        self.linears.append(shape)
        return UNQUANTIZED

    def experts_method_of(self, shape: ExpertsShape) -> ExpertsMethod:
        self.experts.append(shape)
        return UNQUANTIZED_EXPERTS


class ModelLinears:
    """Which linears of a model are packed, and which stay as they are: routers, heads, and those to ignore.

    With `packs_stacks`, stacks of transposed experts are packed, and no linears.
    """

    def __init__(self, config: ModelConfig, ignore: tuple[str, ...], *, packs_stacks: bool = False) -> None:
        """Raises InvalidRequest for a pattern that names no linear, or is none, and for experts that are stacked."""
        listed = _Listed()
        with_listed = WeightsInFormat("listed", (), "", lambda: listed)
        build_weights(replace(config, weight_format=with_listed), _no_source, torch.float32, _META)
        self.packed: list[LinearShape] = []
        self.left_out: list[str] = []  # names of linears
        patterns = {one: _modules(one) for one in ignore}
        shapes = [*listed.linears, *(shape for experts in listed.experts for shape in _of_experts(experts))]
        _check_used(patterns, shapes)
        self.stacks: list[Stack] = []
        for shape in shapes:
            self._sort(shape, list(patterns.values()))
        if packs_stacks:
            self._take_stacks(config.architecture, listed.experts)
        for experts in listed.experts:
            self._check_experts(experts)

    def _sort(self, shape: LinearShape, ignored: list[Modules]) -> None:
        kept = [part for part in shape.parts if shape.kind != "layer" or any(one.has(part.name) for one in ignored)]
        self.left_out += [part.name for part in kept]
        if parts := [part for part in shape.parts if part not in kept]:
            self.packed.append(replace(shape, parts=parts))

    def _take_stacks(self, architecture: str, experts: list[ExpertsShape]) -> None:
        """Packs the stacks in place of the linears. Raises InvalidRequest for a model without such experts."""
        if not experts or not experts[0].names.transposed:
            raise InvalidRequest(
                f"{architecture} has no experts that are stacked and transposed, as those of gpt-oss are, which alone "
                "this format packs; give another format",
                field="format",
            )
        wanted = {part.name for shape in self.packed for part in shape.parts}
        self.left_out += [name for name in wanted if not any(name in _stack_names(one) for one in experts)]
        self.packed = []
        for shape in experts:
            gate_up, down = _stack_names(shape)
            hidden, width = shape.hidden_size, shape.intermediate_size
            both = Stack(gate_up, shape.num_experts, 2 * width, hidden), Stack(down, shape.num_experts, hidden, width)
            self.stacks += [one for one in both if one.name in wanted]

    def _check_experts(self, shape: ExpertsShape) -> None:
        names = {part.name for packed in self.packed for part in packed.parts}
        down = shape.prefix + shape.names.down.format(0).removesuffix(".weight")
        if "{}" not in shape.names.down and down in names:
            raise InvalidRequest(
                f"{down}: its experts are stacked in one tensor, and this format names each expert's linears; "
                f"leave them out with --ignore 're:.*{_inner(shape)}.*'",
                field="ignore",
            )


def _stack_names(shape: ExpertsShape) -> tuple[str, str]:
    return shape.prefix + shape.names.gate_up[0], shape.prefix + shape.names.down


def _inner(shape: ExpertsShape) -> str:
    """Returns what names of a layer's experts begin with."""
    return shape.names.down.removesuffix(".weight").rpartition(".")[0]


def _of_experts(shape: ExpertsShape) -> Iterator[LinearShape]:
    stacked = "{}" not in shape.names.down
    for expert in range(1 if stacked else shape.num_experts):
        yield from linears_of(shape, expert).values()


def _modules(pattern: str) -> Modules:
    try:
        return Modules([pattern])
    except ValueError as error:
        raise InvalidRequest(f"ignore={pattern}: {error}", field="ignore") from error


def _check_used(patterns: dict[str, Modules], shapes: list[LinearShape]) -> None:
    names = [part.name for shape in shapes for part in shape.parts]
    for pattern, modules in patterns.items():
        if not any(modules.has(name) for name in names):
            raise InvalidRequest(
                f"ignore={pattern}: it names no linear of the model; its {len(names)} linears have names such as "
                f"{names[0]} and {names[-1]}; a regular expression begins with re:",
                field="ignore",
            )


def _no_source(name: str, shape: tuple[int, ...], into: Tensor) -> None:
    """Fills nothing: there are no values on the device meta."""
