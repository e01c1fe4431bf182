"""Requests with a constraint: they wait until their grammar is compiled, and after each token until it has it."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from baton.rpc.errors import InvalidRequest, Unsupported
from baton.worker.core import FinishReason
from baton.worker.engine.live_requests import LiveRequests
from baton.worker.engine.mask_wait import MaskWait, max_wait_seconds
from baton.worker.engine.steps_in_flight import StepsInFlight
from baton.worker.requests.state import Phase, RequestState
from baton.worker.sampling.grammar.stats import GrammarStats
from baton.worker.scheduling.rates import Rates
from baton.worker.scheduling.scheduler import Scheduler

if TYPE_CHECKING:
    from baton.worker.sampling.grammar.grammars import Grammars
    from baton.worker.sampling.grammar.matching.match import GrammarMatch


class Constraints:
    """Opens grammars, and continues their requests. Without grammars, it opens none and nothing waits."""

    def __init__(
        self,
        grammars: Grammars | None,
        scheduler: Scheduler,
        requests: LiveRequests,
        in_flight: StepsInFlight,
        rates: Rates,
    ) -> None:
        self._grammars = grammars
        self._scheduler = scheduler
        self._requests = requests
        self._in_flight = in_flight
        self._rates = rates

    @property
    def pending(self) -> bool:
        """Whether a request waits for its grammar."""
        return self._grammars is not None and self._grammars.pending

    @property
    def only_compiling(self) -> bool:
        """Whether requests wait for compilations alone, whose end wakes the loop."""
        grammars = self._grammars
        return grammars is not None and bool(
            grammars.num_compiling and not grammars.num_advancing and grammars.wake is not None
        )

    def check(self) -> None:
        """Raises Unsupported without grammars."""
        if self._grammars is None:
            raise Unsupported("this worker supports no constraints", field="constraint")

    def compile(self, state: RequestState) -> None:
        """Compiles the request's constraint in the background; the request is placed then."""
        assert self._grammars is not None, "checked at submit"
        self._scheduler.compile_first(state)
        state.grammar = self._grammars.open(state.request, state)

    def settle(self) -> None:
        """Continues requests whose grammar is compiled, or has accepted their last token."""
        if self._grammars is None or not self._grammars.pending:
            return
        step_seconds = self._rates.decode_step_seconds
        wait = MaskWait(
            step_seconds,
            in_flight=bool(self._in_flight),
            others_can_run=self._scheduler.can_go_on(),
            advancing=self._grammars.num_advancing > 0,
            woken=self._grammars.wake is not None,
            undrawn_seconds=self._in_flight.undrawn_seconds(step_seconds),
        )
        for match in self._grammars.settle(max_wait_seconds(wait)):
            state = cast(RequestState, match.owner)
            if state.phase is not Phase.DONE:
                self._go_on(state, match)

    def stats(self) -> GrammarStats:
        """Returns the cost of constraints."""
        return GrammarStats() if self._grammars is None else self._grammars.stats()

    def _go_on(self, state: RequestState, match: GrammarMatch) -> None:
        if match.error is not None:
            self._requests.fail(state, match.error)
        elif match.ended and state.request.prefill_only:
            self._requests.fail(
                state, InvalidRequest("the output is complete: nothing may follow it", field="constraint")
            )
        elif match.ended:
            self._requests.finish(state, FinishReason.STOP)
        elif state.phase is Phase.COMPILING:
            self._scheduler.place(state)
        elif len(state.token_ids) >= state.limit:
            self._requests.finish(state, FinishReason.LENGTH)
        else:
            self._scheduler.release(state)
