"""Steps in flight: launched before earlier ones end, collected in order, and applied to their requests."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from baton.rpc.errors import DataLoss, InternalError, NoCapacity, ServiceError
from baton.worker.core import FinishReason, Int32, StepResult, TokenLogprobs
from baton.worker.engine.live_requests import LiveRequests
from baton.worker.engine.step_limits import Shape, StepLimits, shape_of
from baton.worker.executors.base import DeviceLost, Executor
from baton.worker.link.step_status import StepStatus
from baton.worker.requests.outputs import EngineCounters, FirstToken
from baton.worker.requests.state import Phase, RequestState
from baton.worker.scheduling.rates import Rates
from baton.worker.scheduling.scheduler import Scheduler
from baton.worker.scheduling.steps.draft import ScheduledStep

if TYPE_CHECKING:
    from baton.worker.sampling.grammar.grammars import Grammars

_LOG = logging.getLogger(__name__)
_NOT_FINITE = (
    "the model computed values that are not finite numbers; its weights are damaged, or the dtype is too small for them"
)


@dataclass(slots=True)
class _Launched:
    """A step that was launched, or failed to launch."""

    scheduled: ScheduledStep
    launched: float
    shape: Shape
    limit: float  # seconds that it may take; 0: no limit
    undrawn: bool  # its masks are set later
    error: Exception | None = None


class StepsInFlight:
    """Runs the scheduler's steps on the executor. A step that fails to launch fails when it is collected."""

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        requests: LiveRequests,
        counters: EngineCounters,
        rates: Rates,
        clock: Callable[[], float],
        grammars: Grammars | None,
        limits: StepLimits,
        step_status: StepStatus,
    ) -> None:
        self._executor = executor
        self._scheduler = scheduler
        self._requests = requests
        self._append_token = requests.append_token
        self._block_size = executor.kv_spec.block_size
        self._one_each = executor.max_step_tokens == 1  # a decode has one token, unless its step's masks follow
        self._counters = counters
        self._rates = rates
        self._clock = clock
        self._grammars = grammars
        self._limits = limits
        self._step_status = step_status
        self._launched: deque[_Launched] = deque()
        self._last_collect = 0.0

    def __len__(self) -> int:
        return len(self._launched)

    @property
    def num_prefill_tokens_left(self) -> int:
        """Prompt tokens of these steps that are not computed yet, estimated from the measured speed."""
        num_tokens = sum(one.scheduled.num_prefill_tokens for one in self._launched)
        if not num_tokens:
            return 0
        elapsed = self._clock() - max(self._launched[0].launched, self._last_collect)
        return max(0, num_tokens - int(elapsed * self._rates.prefill_tokens_per_second))

    def undrawn_seconds(self, step_seconds: float) -> float | None:
        """Seconds until the device has computed the step that needs masks next, if it takes `step_seconds`.

        None: no step needs any.
        """
        if len(self._launched) != 1 or not self._launched[0].undrawn:
            return None
        begun = max(self._launched[0].launched, self._last_collect)
        return max(0.0, begun + step_seconds - self._clock())

    @property
    def full(self) -> bool:
        """Whether a step must be collected before the next is launched."""
        return len(self._launched) >= self._executor.depth or (bool(self._launched) and self._launched[-1].undrawn)

    @property
    def ended(self) -> bool:
        """Whether collect returns at once."""
        return self._launched[0].error is not None or self._executor.ended()

    def launch(self, scheduled: ScheduledStep) -> float:
        """Launches a step; returns when.

        Raises only DeviceLost: other device errors are raised when it is collected.
        """
        shape = shape_of(scheduled.plan)
        limit = self._limits.limit(scheduled.plan, shape)
        in_flight = _Launched(scheduled, self._clock(), shape, limit, scheduled.plan.masks_follow)
        if not self._launched:
            self._step_status.begin(in_flight.limit)
        self._launched.append(in_flight)
        try:
            self._executor.launch(scheduled.plan)
        except DeviceLost:
            raise
        except Exception as error:  # no error of a device may end other requests
            in_flight.error = error
        return in_flight.launched

    def draw(self) -> None:
        """Sets the newest step's masks, once all earlier steps are collected. Raises DeviceLost."""
        if len(self._launched) != 1 or not self._launched[0].undrawn:
            return
        in_flight = self._launched[0]
        in_flight.undrawn = False
        masks, undrawn = self._scheduler.draw(in_flight.scheduled)
        if in_flight.error is not None:
            return
        try:
            self._executor.draw(masks, undrawn)
        except DeviceLost:
            raise
        except Exception as error:
            in_flight.error = error

    def collect(self) -> None:
        """Waits for the oldest step and applies its results. Raises DeviceLost."""
        in_flight = self._launched.popleft()
        scheduled = in_flight.scheduled
        plan = scheduled.plan
        if in_flight.error is not None:
            self._begin_next()
            self._fail_step(scheduled, in_flight.error)
            return
        try:
            result = self._executor.collect()
        except DeviceLost:
            raise
        except Exception as error:
            self._begin_next()
            self._fail_step(scheduled, error)
            return
        self._begin_next()
        now = self._clock()
        elapsed = now - max(in_flight.launched, self._last_collect)
        self._limits.observe(in_flight.shape, elapsed)
        seconds = result.seconds or elapsed
        self._last_collect = now
        self._requests.outputs.step = plan.step
        self._requests.outputs.seconds = seconds
        self._requests.outputs.num_prefill_tokens = scheduled.num_prefill_tokens
        self._requests.outputs.num_decodes = plan.num_decodes
        self._counters.num_steps += 1
        self._counters.step_seconds += seconds
        self._counters.step_tokens.observe(scheduled.num_prefill_tokens + plan.num_decodes)
        self._rates.observe(scheduled.num_prefill_tokens, plan.num_decodes, seconds)
        self._scheduler.collected(plan.step)
        self._scheduler.commit(scheduled)
        if not self._one_each:
            # Rows without a token were subtracted when they were left out.
            unused = np.where(result.counts > 0, plan.num_scheduled_tokens - result.counts, 0)
            self._scheduler.batch.take_back(scheduled.states, plan.rows, unused[: plan.num_decodes])
            decoded = result.counts[: plan.num_decodes]
            self._rates.observe_tokens(int(np.count_nonzero(decoded)), int(decoded.sum()))
        self._counters.num_proposer_failures += result.num_proposer_failures
        if result.drafted is not None:
            self._count_drafts(scheduled, result.drafted, np.maximum(result.counts[: plan.num_decodes] - 1, 0))
        if self._scheduler.batch.num_constrained:
            self._scheduler.batch.follow(plan.rows[result.counts > 0], False)
        self._update(scheduled, result, now)

    def unwatch(self) -> None:
        """Lifts the time limit of steps in flight: the engine does other work meanwhile."""
        self._step_status.begin(0.0)

    def _count_drafts(self, scheduled: ScheduledStep, drafted: Int32, accepted: Int32) -> None:
        """Counts the drafts of decodes, without those of requests that ended while the step was in flight."""
        drafted, accepted = drafted.copy(), accepted.copy()
        for index in drafted.nonzero()[0].tolist():
            state = scheduled.states[index]
            if state.phase is Phase.DONE:
                drafted[index] = accepted[index] = 0
            state.num_draft_tokens += int(drafted[index])
            state.num_accepted_tokens += int(accepted[index])
        self._counters.count_drafts(drafted, accepted)

    def _begin_next(self) -> None:
        self._step_status.begin(self._launched[0].limit if self._launched else 0.0)

    def _update(self, scheduled: ScheduledStep, result: StepResult, now: float) -> None:
        """Appends each request's tokens, and ends those that stop."""
        plan = scheduled.plan
        token_ids, num_decodes = result.token_ids.tolist(), plan.num_decodes
        for index, (first, entries) in result.prompt_logprobs.items():
            if scheduled.states[index].phase is not Phase.DONE:
                self._requests.outputs.prompt_logprobs.append((scheduled.states[index].request, first, entries))
        if self._one_each and not (plan.masks_follow or result.logprobs or result.failed):
            self._requests.append_each(scheduled.states[:num_decodes], token_ids[:num_decodes])
            place = num_decodes
        else:
            place = self._append_decoded(scheduled, token_ids, result.counts[:num_decodes], result.logprobs)
        damaged = _not_finite(result.pooled)
        for index, count in enumerate(result.counts[num_decodes:].tolist(), num_decodes):
            state = scheduled.states[index]
            if state.phase is Phase.DONE:
                place += count
                continue
            if state.request.prefill_only:
                computed = int(plan.num_computed_tokens[index] + plan.num_scheduled_tokens[index])
                self._requests.outputs.prefill_progress.append((state.request, computed))
            if index in damaged:
                # Another worker would compute the same, so this is no error that moves the text there.
                self._requests.fail(state, DataLoss(_NOT_FINITE))
            elif index in result.pooled:
                self._end_pooled(state, result.pooled[index], now)
            elif count:
                if state.first_token is None:
                    state.first_token = now
                self._append_sampled(state, token_ids[place], result.logprobs.get(place))
                place += 1
        for index, error in result.failed.items():
            state = scheduled.states[index]
            if state.phase is not Phase.DONE and state.row == plan.rows[index]:
                self._requests.fail(state, error)
        if self._grammars is not None:
            self._grammars.send()

    def _end_pooled(self, state: RequestState, vectors: NDArray[np.float32], now: float) -> None:
        state.first_token = now
        self._requests.outputs.pooled.append((state.request, vectors))
        self._requests.finish(state, FinishReason.STOP)

    def _append_sampled(self, state: RequestState, token_id: int, logprobs: TokenLogprobs | None) -> None:
        if state.phase is Phase.DONE:
            self._counters.num_discarded_tokens += 1
        elif state.request.prefill_only:
            self._requests.outputs.first_tokens.append(FirstToken(state.request, token_id, logprobs))
            self._scheduler.hold(state)
        else:
            if state.first_token is None:
                state.first_token = self._clock()
            self._append_token(state, token_id, logprobs)

    def _append_decoded(
        self, scheduled: ScheduledStep, token_ids: list[int], counts: Int32, logprobs: Mapping[int, TokenLogprobs]
    ) -> int:
        """Appends the tokens of decoding requests, any number of each. Returns how many there were."""
        place = 0
        for index, count in enumerate(counts.tolist()):
            if not count:
                continue
            state = scheduled.states[index]
            self._append_sampled(state, token_ids[place], logprobs.get(place))
            stop = place + count
            further = token_ids[place + 1 : stop]
            self._append_further(state, int(scheduled.plan.rows[index]), further, place + 1, logprobs)
            place = stop
        return place

    def _append_further(
        self, state: RequestState, row: int, token_ids: list[int], place: int, logprobs: Mapping[int, TokenLogprobs]
    ) -> None:
        """Appends the tokens after a request's first one, as if each were of a step of its own."""
        for index, token_id in enumerate(token_ids):
            if state.phase is Phase.DONE:
                self._counters.num_discarded_tokens += len(token_ids) - index
                return
            num_computed = len(state.token_ids)
            if state.row == row and num_computed % self._block_size == 0:
                self._scheduler.store(state, num_computed)
            self._append_token(state, token_id, logprobs.get(place + index))

    def _fail_step(self, scheduled: ScheduledStep, error: Exception) -> None:
        """Fails the requests of one step. Those that were preempted since are computed again instead."""
        plan = scheduled.plan
        self._counters.num_failed_steps += 1
        _LOG.error("step %d failed with %d requests", plan.step, len(scheduled.states), exc_info=error)
        self._scheduler.collected(plan.step)
        failure = _as_service_error(plan.step, error)
        for state, row in zip(scheduled.states, plan.rows.tolist(), strict=True):
            if state.row == row:
                self._requests.fail(state, failure)


def _not_finite(vectors: Mapping[int, NDArray[np.float32]]) -> list[int]:
    """Returns the keys of vectors with values that are not finite numbers."""
    if not vectors or np.isfinite(np.concatenate(list(vectors.values()), axis=None)).all():
        return []
    return [index for index, each in vectors.items() if not np.isfinite(each).all()]


def _as_service_error(step: int, error: Exception) -> ServiceError:
    if isinstance(error, ServiceError):
        return error
    kind = type(error).__name__
    if isinstance(error, MemoryError) or "OutOfMemory" in kind:
        return NoCapacity(f"step {step} ran out of memory on the device ({kind})", retry_after_ms=1000)
    return InternalError(f"step {step} failed on the device ({kind})")
