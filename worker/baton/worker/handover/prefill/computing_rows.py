"""The rows of the executor's batch that compute prompts for other workers. Passes each finished layer to its push."""

from __future__ import annotations

import math

from baton.worker.core import Row, StepPlan
from baton.worker.handover.prefill.push_progress import PushProgress


class ComputingRows:
    """The engine's thread changes the rows, the executor's thread reads them."""

    def __init__(self) -> None:
        self._rows: dict[int, tuple[int, PushProgress]] = {}  # first step, progress

    def begin(self, row: Row, first_step: int, progress: PushProgress) -> None:
        """Registers a row that computes this prompt from `first_step` on."""
        self._rows[row] = first_step, progress

    def end(self, progress: PushProgress | None) -> None:
        """Removes a prompt, of which nothing more is computed. Idempotent."""
        for row, (_, other) in list(self._rows.items()):
            if other is progress:
                del self._rows[row]

    def on_layer(self, plan: StepPlan, layer: int) -> None:
        """Handles a finished layer, on the executor's thread."""
        if not self._rows:
            return
        for index in range(plan.num_decodes, len(plan.rows)):
            first_step, progress = self._rows.get(int(plan.rows[index]), (math.inf, None))
            if progress is not None and first_step <= plan.step:
                progress.layer_computed(layer, int(plan.num_computed_tokens[index] + plan.num_scheduled_tokens[index]))
