"""MXFP4 as gpt-oss ships it: stacks of experts, whose rows of gates and ups alternate; all else is as usual."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

from baton.rpc.errors import InvalidRequest
from baton.worker.quantization.base import Finish, LinearShape, Params, Part, QuantMethod, Source
from baton.worker.quantization.experts import DOWN, GATE_UP, ExpertsMethod, ExpertsShape
from baton.worker.quantization.formats import settings as read
from baton.worker.quantization.formats.modules import Modules
from baton.worker.quantization.quantized.experts import PackedExperts
from baton.worker.quantization.quantized.fp4 import MX_GROUP, MxFp4
from baton.worker.quantization.registry import UNQUANTIZED, UNQUANTIZED_EXPERTS
from baton.worker.quantization.weight_format import WeightFormat

_BLOCKS, _SCALES = "_blocks", "_scales"


class StackedMxFp4(PackedExperts):
    """`NAME_blocks` [experts, rows, groups, 16] and `NAME_scales` [experts, rows, groups]."""

    def __init__(self) -> None:
        self._packed = MxFp4(_BLOCKS, _SCALES)
        super().__init__(self._packed, self._packed)

    def load(self, params: Params, shape: ExpertsShape, source: Source) -> Finish:
        """Fills all experts at once."""
        names = shape.names
        gate_up, down = shape.prefix + names.gate_up[0], shape.prefix + names.down
        stacks = (
            (GATE_UP, gate_up, shape.hidden_size, names.gate_up_bias, names.interleaved),
            (DOWN, down, shape.intermediate_size, (names.down_bias,), False),
        )
        for linear, name, columns, biases, alternates in stacks:
            packed, scales = params[f"{linear}.weight"], params[f"{linear}.scale"]
            groups = columns // MX_GROUP
            blocks = packed.unflatten(2, (groups, -1))  # type: ignore[no-untyped-call]
            source(name + _BLOCKS, tuple(blocks.shape), _rows(blocks, alternates))
            source(name + _SCALES, tuple(scales.shape), _rows(scales, alternates))
            if shape.bias:
                bias = params[f"{linear}.bias"]
                source(shape.prefix + biases[0], tuple(bias.shape), _rows(bias, alternates))
        return partial(self._finish, params, {GATE_UP: gate_up, DOWN: down})

    def _finish(self, params: Params, names: Mapping[str, str]) -> None:
        for linear, name in names.items():
            stack = params[f"{linear}.scale"].flatten(0, 1)
            self._packed.complete({"scale": stack}, LinearShape([Part(name, len(stack))], 0))


class GptOssMxFp4(WeightFormat):
    """The experts are packed."""

    covers_experts = True

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._left_out = Modules(read.names(settings, "modules_to_not_convert"))
        self._method = StackedMxFp4()

    def method_of(self, shape: LinearShape) -> QuantMethod:
        return UNQUANTIZED

    def experts_method_of(self, shape: ExpertsShape) -> ExpertsMethod:
        """Raises InvalidRequest for experts that are not stacked."""
        if self._left_out.has(shape.prefix + shape.names.down):
            return UNQUANTIZED_EXPERTS
        if "{}" in shape.names.down or len(shape.names.gate_up) != 1:
            raise InvalidRequest(
                f"{shape.prefix}{shape.names.down}: mxfp4 is read of models that stack their experts, as gpt-oss does",
                field="model",
            )
        return self._method


def _rows(stack: Tensor, alternates: bool) -> Tensor:
    """Returns a view whose rows are in the order of the checkpoint."""
    if not alternates:
        return stack
    pairs: Tensor = stack.unflatten(1, (2, -1)).transpose(1, 2)  # type: ignore[no-untyped-call]
    return pairs


FORMAT = GptOssMxFp4
