"""Integers of groups whose columns a checkpoint scatters over a row, in the order in which they were rounded."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from baton.kernels.packed.weight import PackedWeight
from baton.rpc.errors import InvalidRequest
from baton.worker.quantization.base import Finish, LinearOps, LinearShape, Params, Source
from baton.worker.quantization.neighbours import Kernels
from baton.worker.quantization.quantized.grouped import Grouped, Packing, integers_of, words_of
from baton.worker.quantization.quantized.method import parts_of

_VALUES_AT_ONCE = 1 << 22


class Ordered(Grouped):
    """w_k = (stored_j - zero) * scale of the group of j, for the place j of column k.

    A load sorts columns by their groups (`g_idx`), so that products read a scale once, and keeps where in x each
    column finds its factor: [parts, in_features].
    """

    def __init__(self, packing: Packing, ending: str) -> None:
        super().__init__(packing)
        self._ending = ending
        self._name += ", in the order of activations"

    def joins(self, shape: LinearShape) -> bool:
        """Returns False for several parts: each has an order of its own."""
        return len(shape.parts) == 1 and super().joins(shape)

    def joins_gates(self, shape: LinearShape) -> bool:
        """Returns whether one matrix can hold gates and ups of experts, whose products may read x in two orders."""
        return super().joins(shape) and len({part.rows for part in shape.parts}) == 1

    def create(self, shape: LinearShape, dtype: torch.dtype, device: torch.device) -> Params:
        params = super().create(shape, dtype, device)
        order = torch.empty(len(shape.parts), shape.in_features, dtype=torch.int32, device=device)
        return {**params, "order": order}

    def load(self, params: Params, shape: LinearShape, source: Source) -> Finish:
        """Fills each part, and the groups of its columns, by which the finish sorts them."""
        finish, order = super().load(params, shape, source), params["order"]
        group = self._packing.group or shape.in_features
        order.copy_(torch.arange(shape.in_features, dtype=torch.int32) // group)  # kept by sources without values
        for index, part in enumerate(shape.parts):
            source(part.name + self._ending, (1, shape.in_features), order[index : index + 1])
        return partial(self._sort, params, shape, finish)

    def on_bfloat16(self, kernels: Kernels) -> LinearOps:
        return self.on_cpu(kernels)

    def dequantized(self, params: Params, rows: slice) -> Tensor:
        stored, order = super().dequantized(params, rows), params["order"]
        parts = torch.arange(rows.start, rows.start + len(stored)) // (self.out_features(params) // len(order))
        return torch.empty_like(stored).scatter_(1, order[parts].long(), stored)

    def packed_weight(self, params: Params) -> PackedWeight:
        return super().packed_weight(params)._replace(order=params["order"])

    def _sort(self, params: Params, shape: LinearShape, finish: Finish) -> None:
        num_groups, bits = params["scale"].shape[1], self._packing.bits
        for (part, rows), groups in zip(parts_of(shape), params["order"], strict=True):
            self._check(part.name, groups.tolist(), num_groups, shape.in_features // num_groups)
            order = groups.argsort(stable=True)
            weight = params["weight"][rows]
            step = max(1, _VALUES_AT_ONCE // shape.in_features)
            for some in weight.split(step):  # type: ignore[no-untyped-call]
                some.copy_(words_of(integers_of(some, bits).index_select(1, order), bits))
            groups.copy_(order)
        finish()

    def _check(self, name: str, groups: Sequence[int], num_groups: int, size: int) -> None:
        """Raises InvalidRequest for groups that are not there, or have more or fewer columns than others."""
        if min(groups) < 0 or max(groups) >= num_groups:
            raise InvalidRequest(
                f"{name}{self._ending} holds groups from {min(groups)} to {max(groups)}; there are {num_groups} of "
                f"{size} columns",
                field="model",
            )
        counts = torch.bincount(torch.tensor(groups), minlength=num_groups)
        for group in (counts != size).nonzero().flatten().tolist()[:1]:
            raise InvalidRequest(
                f"{name}{self._ending} holds {int(counts[group])} columns of group {group}; each of the {num_groups} "
                f"groups must have {size}",
                field="model",
            )
