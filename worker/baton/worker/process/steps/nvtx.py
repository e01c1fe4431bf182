"""NVTX ranges around steps, for Nsight Systems. Imports torch."""

from __future__ import annotations

from typing import Protocol

from baton.rpc.errors import InvalidRequest
from baton.worker.core import StepPlan, StepResult
from baton.worker.executors.base import Executor
from baton.worker.process.steps.wrapped_executor import WrappedExecutor


class Ranges(Protocol):
    """torch.cuda.nvtx, or what stands in for it."""

    def range_push(self, text: str) -> object:
        """Begins a range of this thread."""

    def range_pop(self) -> object:
        """Ends the newest range."""


class NvtxExecutor(WrappedExecutor):
    """An Executor with a range for each launch and each wait: `launch 7: 3 decodes, 512 prompt tokens`."""

    def __init__(self, executor: Executor, ranges: Ranges) -> None:
        super().__init__(executor)
        self._ranges = ranges

    def launch(self, plan: StepPlan) -> None:
        text = f"launch {plan.step}: {plan.num_decodes} decodes, {plan.num_prefill_tokens} prompt tokens"
        self._ranges.range_push(text)
        try:
            self._executor.launch(plan)
        finally:
            self._ranges.range_pop()

    def collect(self) -> StepResult:
        self._ranges.range_push("collect")
        try:
            return self._executor.collect()
        finally:
            self._ranges.range_pop()


def nvtx_ranges() -> Ranges:
    """Returns torch's NVTX. Raises InvalidRequest if this PyTorch has none."""
    import torch

    if torch.version.cuda is None:
        raise InvalidRequest(f"nvtx=true needs a PyTorch with CUDA, this is {torch.__version__}", field="nvtx")
    from torch.cuda import nvtx

    return nvtx
