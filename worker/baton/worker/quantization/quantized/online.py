"""Unquantized weights that are rounded to 8 bits while they load, each row with a scale of its own."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from baton.rpc.errors import InvalidRequest
from baton.worker.quantization.base import LinearShape, Params, Source, Staged
from baton.worker.quantization.experts import DOWN, GATE_UP, ExpertsShape
from baton.worker.quantization.quantized.experts import PackedExperts
from baton.worker.quantization.quantized.method import parts_of
from baton.worker.quantization.quantized.scaled import FP8, Scaled
from baton.worker.quantization.quantized.stacked import expert_of
from baton.worker.quantization.registry import UNQUANTIZED, UNQUANTIZED_EXPERTS

_LARGEST = 448.0  # of e4m3
_ROWS_AT_ONCE = 4096
# Rounding from what the model computes in would round twice.
_STAGED = torch.float32


class OnlineFp8(Scaled):
    """w = stored * scale of the row, whose largest value becomes 448"""

    def __init__(self) -> None:
        super().__init__(FP8)
        self._name += ", rounded at load"

    def load(self, params: Params, shape: LinearShape, source: Source) -> Staged:
        """Fills the bias, and a weight in fp32 that is rounded and freed."""
        staged = dict(UNQUANTIZED.create(shape, _STAGED, params["weight"].device)) | _bias("bias", params, "bias")
        UNQUANTIZED.load(staged, shape, source)
        num_bytes = staged["weight"].nbytes
        return Staged(partial(self._round, params, shape, staged), num_bytes)

    def _round(self, params: Params, shape: LinearShape, staged: dict[str, Tensor]) -> None:
        weight = staged.pop("weight")
        for part, rows in parts_of(shape):
            _round_rows(params, weight[rows], rows.start, f"{part.name}.weight")


class OnlineExperts(PackedExperts):
    """Experts of such linears, whichever way a checkpoint has unquantized ones."""

    def __init__(self, method: OnlineFp8) -> None:
        super().__init__(method, method)

    def load(self, params: Params, shape: ExpertsShape, source: Source) -> Staged:
        """Fills the biases, and the layer's weights in fp32 that are rounded and freed."""
        staged = dict(UNQUANTIZED_EXPERTS.create(shape, _STAGED, params[f"{DOWN}.weight"].device))
        for linear in (GATE_UP, DOWN):
            staged |= _bias(f"{linear}_bias", params, f"{linear}.bias")
        UNQUANTIZED_EXPERTS.load(staged, shape, source)
        num_bytes = staged[GATE_UP].nbytes + staged[DOWN].nbytes
        return Staged(partial(self._round, params, shape, staged), num_bytes)

    def _round(self, params: Params, shape: ExpertsShape, staged: dict[str, Tensor]) -> None:
        names = {GATE_UP: shape.names.gate_up[0], DOWN: shape.names.down}
        for linear, name in names.items():
            for expert, weight in enumerate(staged.pop(linear)):
                _round_rows(expert_of(params, linear, expert), weight, 0, shape.prefix + name.format(expert))


def _bias(ours: str, params: Params, theirs: str) -> dict[str, Tensor]:
    return {ours: params[theirs]} if theirs in params else {}


def _round_rows(params: Params, weight: Tensor, first: int, name: str) -> None:
    """Rounds the rows of a weight, the first of which becomes row `first`. Raises InvalidRequest for a NaN."""
    for start in range(0, len(weight), _ROWS_AT_ONCE):
        values = weight[start : start + _ROWS_AT_ONCE]
        largest = values.abs().amax(1, keepdim=True)
        if not bool(torch.isfinite(largest).all()):
            raise InvalidRequest(
                f"{name} holds values that are not finite: the checkpoint is damaged; download it again", field="model"
            )
        scale = torch.where(largest > 0, largest / _LARGEST, 1.0)
        rows = slice(first + start, first + start + len(values))
        params["scale"][rows] = scale
        params["weight"][rows] = values.div_(scale).to(FP8)
