"""Embeddings: one matrix, or one that stays packed, of which the rows that are asked for are dequantized."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from baton.worker.quantization.base import Params, TableMethod


@dataclass(frozen=True, slots=True)
class PackedTable:
    """A packed embedding [num_rows, columns]."""

    method: TableMethod
    params: Params
    columns: int

    def __len__(self) -> int:
        """Returns the number of rows."""
        return self.method.out_features(self.params)


Table = Tensor | PackedTable


def columns_of(table: Table) -> int:
    """Returns the size of a row."""
    return table.columns if isinstance(table, PackedTable) else table.shape[1]


def take(table: Table, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns rows of a table on a CPU, [num_ids, columns]."""
    if isinstance(table, PackedTable):
        return table.method.taken(table.params, ids).to(dtype)
    return table.index_select(0, ids)
