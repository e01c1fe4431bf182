"""The interface of heads, which compute results from the last hidden states of a step. One for each kind of result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from baton.worker.core import Int32, StepPlan, TokenMasks

if TYPE_CHECKING:
    from torch import Tensor

    from baton.worker.models.model import Model

S_contra = TypeVar("S_contra", contravariant=True)  # the inputs of a step on one type of device
U = TypeVar("U")  # a step between `run` and `finish`
R_co = TypeVar("R_co", covariant=True)  # the results of a step


class Head(Protocol[S_contra, U, R_co]):
    """A head on a device, with its state of the batch's rows."""

    def take_rows(self, plan: StepPlan) -> None:
        """Drops the plan's freed rows and stores the parameters of its admitted rows."""

    def run(self, plan: StepPlan, step: S_contra, decoder: Model[Any], hidden: Tensor) -> U:
        """Computes all that needs no masks, from the residual stream [num_tokens, hidden_size] of the step's tokens."""

    def finish(self, plan: StepPlan, undrawn: U, masks: TokenMasks | None, left_out: Int32) -> R_co:
        """Computes the results of the plan's rows, except those left out. See Executor.draw."""
