"""Adds up the estimated arithmetic and memory traffic of launched steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from baton.v1 import control_pb2
from baton.worker.core import StepPlan
from baton.worker.executors.base import Executor
from baton.worker.models.costs import ModelCosts
from baton.worker.process.steps.wrapped_executor import WrappedExecutor


@dataclass(slots=True)
class StepCosts:
    """Totals since the start."""

    flops: float = 0.0
    read_bytes: float = 0.0
    written_bytes: float = 0.0

    def message(self) -> control_pb2.StepCosts:
        """Returns their form in the contract."""
        return control_pb2.StepCosts(flops=self.flops, read_bytes=self.read_bytes, written_bytes=self.written_bytes)


class MeteredExecutor(WrappedExecutor):
    """An Executor whose steps are added up."""

    def __init__(self, executor: Executor, costs: ModelCosts, totals: StepCosts) -> None:
        super().__init__(executor)
        self._costs = costs
        self._totals = totals

    def launch(self, plan: StepPlan) -> None:
        self._executor.launch(plan)
        if len(plan.rows):
            samples = int(np.count_nonzero(plan.samples))
            cost = self._costs.of_step(plan.num_computed_tokens, plan.num_scheduled_tokens, samples)
            self._totals.flops += cost.flops
            self._totals.read_bytes += cost.read_bytes
            self._totals.written_bytes += cost.written_bytes
