"""vLLM's three limits: what a long prompt gets of a step, and how many prompts are partly computed at a time."""

from __future__ import annotations

import random

import pytest
from support.engine.rigs.scheduler_rig import chunks, make_scheduler, place, run_step

from baton.rpc.errors import InvalidRequest
from baton.worker.requests.state import Phase
from baton.worker.scheduling.settings import EngineSettings

BUDGET = 16


def scheduler_of(**limits):
    return make_scheduler(1000, max_num_requests=16, **limits)


def test_a_long_prompt_leaves_the_rest_of_the_step_to_others():
    scheduler = scheduler_of(long_prefill_token_threshold=6)
    long, short = place(scheduler, 100), place(scheduler, 5)
    assert chunks(run_step(scheduler)) == {long: 6, short: 5}


def test_without_a_threshold_it_takes_the_whole_step():
    scheduler = scheduler_of()
    long, short = place(scheduler, 100), place(scheduler, 5)
    assert chunks(run_step(scheduler)) == {long: BUDGET}
    assert short.phase is Phase.WAITING


def test_short_prompts_pass_long_ones_while_enough_are_in_progress():
    scheduler = scheduler_of(long_prefill_token_threshold=6, max_long_partial_prefills=1)
    first, second = place(scheduler, 20), place(scheduler, 20)
    short = place(scheduler, 5)
    assert chunks(run_step(scheduler)) == {first: 6, short: 5}
    assert second.phase is Phase.WAITING
    steps = [run_step(scheduler) for _ in range(3)]
    # At the start of the last step, 2 tokens of the first prompt are left: it is not long any more.
    assert [chunks(step).get(first) for step in steps] == [6, 6, 2]
    assert [second in step.states for step in steps] == [False, False, True]


def test_a_long_prompt_that_was_passed_starts_when_the_other_is_aborted():
    scheduler = scheduler_of(long_prefill_token_threshold=6, max_long_partial_prefills=1)
    first, second = place(scheduler, 50), place(scheduler, 50)
    run_step(scheduler)
    scheduler.retire(first)
    assert scheduler.runnable()
    assert chunks(run_step(scheduler)) == {second: 6}


def test_long_prompts_start_in_their_order():
    scheduler = scheduler_of(long_prefill_token_threshold=6, max_long_partial_prefills=1)
    longs = [place(scheduler, 20) for _ in range(4)]
    urgent = place(scheduler, 20, priority=-1)
    started = []
    for _ in range(40):
        started += [state for state in run_step(scheduler).states if state not in started]
    assert started == [urgent, *longs]


def test_one_more_prompt_is_partly_computed_only_if_the_limit_allows():
    scheduler = scheduler_of(max_num_partial_prefills=1)
    first, second = place(scheduler, 20), place(scheduler, 15)
    assert chunks(run_step(scheduler)) == {first: BUDGET}
    # 12 tokens are left beside the first prompt's 4; none is in progress then, so the second may begin.
    assert chunks(run_step(scheduler)) == {first: 4, second: 12}
    third = place(scheduler, 15)
    # 12 tokens are left beside 3 and a decode; the third would be in progress alone.
    assert chunks(run_step(scheduler)) == {first: 1, second: 3, third: 12}


def test_several_partial_prompts_have_a_threshold_of_4_percent_of_the_models_length():
    scheduler = scheduler_of(max_num_partial_prefills=2, max_num_batched_tokens=500)
    length = 1000 * 4  # of the pool, which is the model's length here
    states = [place(scheduler, 900) for _ in range(3)]
    scheduled = chunks(run_step(scheduler))
    assert scheduled == {states[0]: length * 4 // 100, states[1]: length * 4 // 100}


@pytest.mark.parametrize("tenants", [1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_every_prompt_ends_under_every_limit(seed, tenants):
    chance = random.Random(seed)
    scheduler = make_scheduler(
        120,
        long_prefill_token_threshold=chance.choice((0, 3, 7)),
        max_num_partial_prefills=2,
        max_long_partial_prefills=chance.choice((0, 1, 2)),
    )
    waiting = [chance.randrange(1, 60) for _ in range(30)]
    states = []
    for _ in range(3000):
        if waiting and chance.random() < 0.3:
            states.append(place(scheduler, waiting.pop(), 3, tenant=f"t{chance.randrange(tenants)}"))
        if not scheduler.runnable():
            if not waiting:
                break
            continue
        scheduled = run_step(scheduler)
        partial = [
            state
            for state in scheduler.batch.prefilling
            if int(scheduler.batch.num_computed[state.row]) < len(state.token_ids)
        ]
        assert len(partial) <= 2
        for state in scheduled.states:
            if state.phase is not Phase.DONE and state.num_output_tokens >= 3:
                scheduler.retire(state)
        scheduler.check_integrity([state for state in states if state.phase is not Phase.DONE])
    assert all(state.phase is Phase.DONE for state in states)
    assert len(states) == 30


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_num_partial_prefills": 1, "max_long_partial_prefills": 2}, "at most max_num_partial_prefills, 1"),
        ({"max_long_partial_prefills": 1}, "no prompt is long"),
        ({"long_prefill_token_threshold": -1}, "at least 0"),
    ],
)
def test_limits_that_contradict_each_other_are_refused(limits, message):
    with pytest.raises(InvalidRequest, match=message):
        EngineSettings(**limits).validate()


def test_a_threshold_above_the_models_length_is_refused():
    with pytest.raises(InvalidRequest, match="at most max_model_len, 4000"):
        scheduler_of(long_prefill_token_threshold=4001)
