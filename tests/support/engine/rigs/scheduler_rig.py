"""A scheduler without an engine: places requests, and treats steps as computed."""

from __future__ import annotations

from collections.abc import Callable

from support.engine.engine_harness import BLOCK_SIZE, make_request, prompt_of

from baton.worker.requests.outputs import EngineCounters
from baton.worker.requests.state import Phase, RequestState
from baton.worker.scheduling.scheduler import Scheduler
from baton.worker.scheduling.settings import EngineSettings
from baton.worker.scheduling.steps.draft import ScheduledStep


def make_scheduler(num_blocks: int = 64, clock: Callable[[], float] = lambda: 0.0, **values: int) -> Scheduler:
    settings = EngineSettings(**{"max_num_requests": 8, "max_num_batched_tokens": 16, **values})
    return Scheduler(num_blocks, BLOCK_SIZE, num_blocks * BLOCK_SIZE, settings, EngineCounters(), clock)


ORDER = iter(range(1_000_000))


def place(
    scheduler: Scheduler, length: int, max_tokens: int = 100, priority: int = 0, **values: object
) -> RequestState:
    number = next(ORDER)
    request = make_request(prompt_of(length, salt=number), max_tokens, priority=priority, **values)
    rank = (priority, 0.0, number)
    limit = min(length + max_tokens, scheduler.pool.num_blocks * BLOCK_SIZE)
    state = RequestState(request, rank, limit, frozenset(), 0.0)
    state.hash_up_to(length, BLOCK_SIZE)
    scheduler.place(state)
    return state


def run_step(scheduler: Scheduler) -> ScheduledStep:
    """Schedules a step and reports a result in which every token is 7."""
    scheduled = scheduler.schedule()
    assert scheduled is not None
    finish_step(scheduler, scheduled)
    return scheduled


def finish_step(scheduler: Scheduler, scheduled: ScheduledStep) -> None:
    scheduler.collected(scheduled.plan.step)
    scheduler.commit(scheduled)
    for state, sampled in zip(scheduled.states, scheduled.plan.samples, strict=True):
        if sampled and state.phase is not Phase.DONE:
            state.token_ids.append(7)


def chunks(scheduled: ScheduledStep) -> dict[RequestState, int]:
    return dict(zip(scheduled.states, scheduled.plan.num_scheduled_tokens.tolist(), strict=True))
