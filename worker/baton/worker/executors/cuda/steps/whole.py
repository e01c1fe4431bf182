"""Runs a step of whole prompts on the device. Knows no queue, no engine and no start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from baton.kernels.attention.whole import TileColumns, tile_columns
from baton.worker.core import Int32, StepPlan
from baton.worker.executors.cuda.steps.whole_graphs import FEW_ROWS, FEW_TOKENS, WholeGraphs
from baton.worker.executors.heads import Head
from baton.worker.executors.host.whole_rows import WholeColumns, WholeRows
from baton.worker.layers.cuda.whole import WholeInputs
from baton.worker.models.model import Model

_INVARIANT_ROWS = 128  # of a tile


class WholeStepper:
    """A model and heads over prompts that are computed whole. `upload` copies int32 values to the device."""

    def __init__(
        self,
        rows: WholeRows,
        decoder: Model[WholeInputs],
        upload: Callable[[Int32], Tensor],
        *,
        batch_invariant: bool = False,
    ) -> None:
        self.graphs: WholeGraphs | None = None
        self._rows = rows
        self._decoder = decoder
        self._upload = upload
        self._invariant = batch_invariant

    def run(self, plan: StepPlan, head: Head[Any, Any, Any]) -> Any:
        """Runs any step. Returns what the head computed."""
        columns = self._rows.columns(plan)
        graphs = self.graphs
        if graphs is not None and graphs.fit(columns):
            hidden = graphs.replay(columns)
        else:
            hidden = self._decoder.forward(self._inputs(columns))
        return head.run(plan, None, self._decoder, hidden)

    def _inputs(self, columns: WholeColumns) -> WholeInputs:
        tiles = self._tiles(columns)
        types = () if columns.token_types is None else (columns.token_types,)
        up = self._upload(np.concatenate((columns.token_ids, columns.positions, *types, tiles.flat)))
        num_tokens = len(columns.token_ids)
        return WholeInputs(
            up[:num_tokens],
            up[num_tokens : 2 * num_tokens],
            up[2 * num_tokens : 3 * num_tokens] if types else None,
            tiles.on(up[(2 + len(types)) * num_tokens :]),
        )

    def _tiles(self, columns: WholeColumns) -> TileColumns:
        if self._invariant:
            return tile_columns(columns.seq_lens, _INVARIANT_ROWS)
        return tile_columns(columns.seq_lens, FEW_ROWS if len(columns.token_ids) <= FEW_TOKENS else 0)
