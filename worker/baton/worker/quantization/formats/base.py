"""What the formats of ours share: a method for each linear by its name."""

from __future__ import annotations

from abc import abstractmethod

from baton.rpc.errors import InvalidRequest
from baton.worker.quantization.base import LinearShape, QuantMethod, TableMethod
from baton.worker.quantization.experts import DOWN, GATE_UP, ExpertsMethod, ExpertsShape
from baton.worker.quantization.quantized.experts import PackedExperts, linears_of
from baton.worker.quantization.quantized.method import PackedMethod
from baton.worker.quantization.quantized.per_part import PerPart
from baton.worker.quantization.registry import UNQUANTIZED, UNQUANTIZED_EXPERTS
from baton.worker.quantization.weight_format import WeightFormat


class FormatOfLinears(WeightFormat):
    """A format that stores linears, those of experts too, one by one. Routers, and heads too, stay as they are."""

    covers_experts = True
    covers_heads = False
    covers_tables = False

    @abstractmethod
    def packed(self, name: str) -> PackedMethod | None:
        """Returns how the linear of this name is stored; None: it is left out. Equal ways are one object."""

    def method_of(self, shape: LinearShape) -> QuantMethod:
        """Returns one method, or one for each part where the parts differ or cannot share a matrix."""
        if shape.kind == "router" or (shape.kind == "head" and not self.covers_heads):
            return UNQUANTIZED
        methods = [self.packed(part.name) for part in shape.parts]
        first = methods[0]
        if all(method is first for method in methods) and (first is None or first.joins(shape)):
            return first or UNQUANTIZED
        return PerPart([method or UNQUANTIZED for method in methods])

    def table_method_of(self, shape: LinearShape) -> TableMethod | None:
        """Returns the method of an embedding that the format covers and does not leave out."""
        return self.packed_table(shape.parts[0].name) if self.covers_tables else None

    def packed_table(self, name: str) -> PackedMethod | None:
        """Returns how the embedding of this name is stored; None: it is left out."""
        return self.packed(name)

    def experts_method_of(self, shape: ExpertsShape) -> ExpertsMethod:
        """Returns one method for all experts. Raises InvalidRequest for experts that differ, or are laid out
        as gpt-oss has them."""
        ways = [self._ways(shape, expert) for expert in range(shape.num_experts)]
        if all(method is None for method in ways[0]):
            if any(method is not None for way in ways for method in way):
                raise _uneven(shape)
            return UNQUANTIZED_EXPERTS
        if shape.names.transposed or shape.names.interleaved:
            raise InvalidRequest(
                f"{shape.prefix}{shape.names.down}: experts whose matrices are transposed or alternate are not read in "
                "this format; a checkpoint that names each expert's linears is",
                field="model",
            )
        if any(way != ways[0] for way in ways):
            raise _uneven(shape)
        linears = linears_of(shape, 0)
        return PackedExperts(self.gates_method_of(linears[GATE_UP]), self.method_of(linears[DOWN]))

    def gates_method_of(self, shape: LinearShape) -> QuantMethod:
        """As `method_of`, for gates and ups of experts, whose kernels read more."""
        first, *others = (self.packed(part.name) for part in shape.parts)
        if first is not None and all(method is first for method in others) and first.joins_gates(shape):
            return first
        return self.method_of(shape)

    def _ways(self, shape: ExpertsShape, expert: int) -> list[PackedMethod | None]:
        return [self.packed(part.name) for linear in linears_of(shape, expert).values() for part in linear.parts]


def _uneven(shape: ExpertsShape) -> InvalidRequest:
    return InvalidRequest(
        f"{shape.prefix}: quantization_config has different formats for its experts; they must be equal", field="model"
    )
