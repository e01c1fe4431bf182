"""The rows of the batch whose logits are computed, for adapters that change the head."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from baton.worker.core import Int64


class HeadAdapters(Protocol):
    """The adapters of an executor, to its head."""

    def head_used(self, rows: Int64) -> AbstractContextManager[None]:
        """Has logits computed with the updates of rows [num_states] of the batch, one for each state; -1: of none."""


class NoHeadAdapters:
    """Implements HeadAdapters for executors without adapters."""

    def head_used(self, rows: Int64) -> AbstractContextManager[None]:
        return nullcontext()
