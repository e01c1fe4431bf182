"""Heads: what a model makes of a step's last hidden states, one for each kind of result that requests ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from baton.worker.core import Int32, StepPlan, TokenMasks

if TYPE_CHECKING:
    from torch import Tensor

    from baton.worker.models.decoder import Decoder

S_contra = TypeVar("S_contra", contravariant=True)  # a step's inputs on one kind of device
U = TypeVar("U")  # a step between `run` and `finish`
R_co = TypeVar("R_co", covariant=True)  # what a step leaves behind


class Head(Protocol[S_contra, U, R_co]):
    """One head on one device, with what it keeps of the batch's rows."""

    def take_rows(self, plan: StepPlan) -> None:
        """Forgets the plan's freed rows, and takes what requests of its admitted rows ask for."""

    def run(self, plan: StepPlan, step: S_contra, decoder: Decoder[Any], hidden: Tensor) -> U:
        """Takes the residual stream [num_tokens, hidden_size] of the step's tokens. Does what needs no masks."""

    def finish(self, plan: StepPlan, undrawn: U, masks: TokenMasks | None, left_out: Int32) -> R_co:
        """Makes the results of the plan's rows, but of those left out: see Executor.draw."""
