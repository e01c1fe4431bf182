"""An engine's requests, from their submit until their Finish or Failure is in the outputs. Schedules nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from baton.rpc.errors import DeadlineExceeded, ServiceError
from baton.worker.core import FinishReason, TokenLogprobs
from baton.worker.requests.deadlines import Deadlines
from baton.worker.requests.outputs import EngineCounters, Failure, Finish, StepOutputs
from baton.worker.requests.state import Phase, RequestState
from baton.worker.scheduling.scheduler import Scheduler

if TYPE_CHECKING:
    from baton.worker.engine.adapters.pool import AdapterPool
    from baton.worker.sampling.grammar.grammars import Grammars

_LOG = logging.getLogger(__name__)


class LiveRequests:
    """Requests that run or wait, ended ones with an open lease, and the next outputs."""

    def __init__(
        self, scheduler: Scheduler, counters: EngineCounters, clock: Callable[[], float], grammars: Grammars | None
    ) -> None:
        self.states: dict[str, RequestState] = {}
        self.outputs = StepOutputs()
        self._scheduler = scheduler
        self._counters = counters
        self._clock = clock
        self._grammars = grammars
        self.adapters: AdapterPool[RequestState] | None = None  # set by an engine that has some
        self._deadlines = Deadlines()

    def add(self, state: RequestState) -> bool:
        """Adds a request. False: it was submitted with all its tokens, and only its Finish had been lost."""
        self.states[state.request.request_id] = state
        self._deadlines.add(state)
        if state.num_output_tokens and not state.request.prefill_only:
            return not self._finish_if_stopped(state, state.token_ids[-1])
        return True

    def live(self, request_id: str) -> RequestState | None:
        """Returns the request, unless it has ended."""
        state = self.states.get(request_id)
        return None if state is None or state.phase is Phase.DONE else state

    def next_deadline(self) -> float | None:
        """Returns the earliest deadline of all requests."""
        return self._deadlines.next()

    def expire(self) -> None:
        """Fails the requests whose deadline has passed."""
        if self._deadlines.next() is None:
            return
        now = self._clock()
        while (state := self._deadlines.pop_expired(now)) is not None:
            waited = now - state.submitted
            phase = state.phase.value
            self.fail(state, DeadlineExceeded(f"not finished {waited:.3f} s after its submission; it was {phase}"))

    def append_token(self, state: RequestState, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """Appends a token to the output. It may be the last."""
        outputs = self.outputs
        if logprobs is not None:
            outputs.logprobs[len(outputs.token_ids)] = logprobs
        outputs.requests.append(state.request)
        outputs.token_ids.append(token_id)
        state.request.token_ids.append(token_id)
        self._counters.num_output_tokens += 1
        self._end_or_advance(state, token_id)

    def append_each(self, states: Sequence[RequestState], token_ids: Sequence[int]) -> None:
        """Appends one token to the output of each decoding request that has not ended."""
        outputs, num_before, done = self.outputs, len(self.outputs.token_ids), Phase.DONE
        add_request, add_token = outputs.requests.append, outputs.token_ids.append
        for state, token_id in zip(states, token_ids, strict=True):
            if state.phase is done:
                continue
            if state.first_token is None:
                state.first_token = self._clock()
            request = state.request
            add_request(request)
            add_token(token_id)
            generated = request.token_ids.generated
            generated.append(token_id)
            if token_id in state.stop_token_ids or len(generated) >= state.max_generated or state.grammar is not None:
                self._end_or_advance(state, token_id)
        num_appended = len(outputs.token_ids) - num_before
        self._counters.num_output_tokens += num_appended
        self._counters.num_discarded_tokens += len(states) - num_appended

    def finish(self, state: RequestState, reason: FinishReason, stop_token_id: int | None = None) -> None:
        if reason is FinishReason.ABORT:
            self._counters.num_aborted += 1
        else:
            self._counters.num_finished += 1
        started = state.started if state.started is not None else state.submitted
        first_token = state.first_token if state.first_token is not None else started
        # A remote prefill may fail after its first token; the local one in its place starts later.
        started = min(started, first_token)
        finish = Finish(
            request=state.request,
            reason=reason,
            stop_token_id=stop_token_id,
            num_cached_tokens=state.num_cached_tokens,
            num_transferred_tokens=state.num_transferred_tokens,
            num_preemptions=state.num_preemptions,
            num_draft_tokens=state.num_draft_tokens,
            num_accepted_tokens=state.num_accepted_tokens,
            queue_seconds=started - state.submitted,
            prefill_seconds=first_token - started,
        )
        self.retire(state)
        self.outputs.finishes.append(finish)

    def fail(self, state: RequestState, error: ServiceError) -> None:
        """Ends a request that cannot continue."""
        self._counters.num_failed += 1
        self.retire(state)
        self.outputs.failures.append(Failure(state.request, error))
        _LOG.warning("request failed: %s", error.log_text, extra={"request_id": state.request.request_id})

    def retire(self, state: RequestState) -> None:
        """Removes a request from the engine, except an open lease."""
        if state.grammar is not None and self._grammars is not None:
            self._grammars.end(state.grammar)
        if state.request.adapter is not None and self.adapters is not None:
            self.adapters.end(state, state.request.adapter, self._scheduler.last_step)
        self._scheduler.retire(state)
        self.forget_if_done(state)

    def forget_if_done(self, state: RequestState) -> None:
        """Drops a request that has ended and has no lease."""
        if state.phase is Phase.DONE and not state.leased:
            self.states.pop(state.request.request_id, None)

    def take_outputs(self) -> StepOutputs:
        """Returns the outputs since the last call."""
        outputs, self.outputs = self.outputs, StepOutputs(step=self.outputs.step)
        outputs.prefill_wanted = self._scheduler.take_prefill_wanted()
        return outputs

    def _end_or_advance(self, state: RequestState, token_id: int) -> None:
        """Ends the request if its last token is a stop token or reaches its limit. Else its grammar accepts it."""
        num_generated = len(state.request.token_ids.generated)
        if token_id in state.stop_token_ids or (state.grammar is None and num_generated >= state.max_generated):
            self._finish_if_stopped(state, token_id)
        if state.grammar is not None and self._grammars is not None and state.phase is not Phase.DONE:
            self._grammars.advance(state.grammar, token_id)

    def _finish_if_stopped(self, state: RequestState, token_id: int) -> bool:
        stop = state.request.stop
        if token_id in state.stop_token_ids and state.num_output_tokens >= stop.min_tokens:
            is_eos = token_id in stop.eos_token_ids
            self.finish(state, FinishReason.STOP, None if is_eos else token_id)
        elif len(state.token_ids) >= state.limit:
            self.finish(state, FinishReason.LENGTH)
        return state.phase is Phase.DONE
