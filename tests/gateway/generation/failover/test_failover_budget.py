"""Requests that are blamed for workers' deaths, and their end."""

import pytest

from baton.gateway.generation.retry_budget import (
    LET_OFF_TOKENS,
    MAX_DEATHS,
    MAX_MOVES,
    MAX_PAUSE_SECONDS,
    MAX_REFUSALS,
    Loss,
    PoisonousRequest,
    RetryBudget,
    WorkerLost,
)
from baton.rpc.errors import InternalError, InvalidRequest, NoCapacity, Unavailable


def died(worker_id="w0"):
    error = WorkerLost(f"lost {worker_id}", worker_id=worker_id)
    error.loss = Loss.DIED
    return error


def gone():
    return WorkerLost("never reached")


def test_a_second_death_is_the_last():
    budget = RetryBudget(1)
    budget.spend(0, 10, died("w0"), "first")
    with pytest.raises(PoisonousRequest, match=r"2 workers died .*w0 after 10 tokens: .*w1 after 12 tokens") as caught:
        budget.spend(0, 12, died("w1"), "second")
    assert not caught.value.retryable


def test_a_failed_step_counts_as_a_death():
    budget = RetryBudget(1)
    budget.spend(0, 0, InternalError("the step failed", worker_id="w0"), "first")
    with pytest.raises(PoisonousRequest):
        budget.spend(0, 0, died("w1"), "second")


def test_choices_that_are_lost_together_are_one_death():
    budget = RetryBudget(4)
    for choice in range(4):
        budget.spend(choice, 5, died(), "first")
    with pytest.raises(PoisonousRequest):
        budget.spend(2, 6, died(), "second")


def test_tokens_between_deaths_reset_the_count_up_to_a_maximum():
    budget = RetryBudget(1)
    tokens = 0
    for number in range(MAX_DEATHS - 1):
        tokens += LET_OFF_TOKENS
        budget.spend(0, tokens, died(), number)
    with pytest.raises(PoisonousRequest, match=f"{MAX_DEATHS} workers"):
        budget.spend(0, tokens + LET_OFF_TOKENS, died(), "last")


def test_a_worker_that_was_never_reached_is_no_death():
    budget = RetryBudget(1)
    for number in range(MAX_MOVES):
        budget.spend(0, 0, gone(), number)
    budget.spend(0, 1, Unavailable("it drains"), "after a token")
    for number in range(MAX_MOVES - 1):
        budget.spend(0, 1, gone(), number)
    with pytest.raises(WorkerLost):
        budget.spend(0, 1, gone(), "last")


def test_moves_that_bring_nothing_wait_longer_and_longer():
    budget = RetryBudget(2)
    pauses = []
    for _ in range(MAX_MOVES):
        budget.spend(0, 0, gone(), object())
        pauses.append(budget.pause_seconds(0))
    assert pauses == [0.0, 0.0, 0.05, 0.1, 0.2, 0.4, 0.8, MAX_PAUSE_SECONDS]
    assert budget.pause_seconds(1) == 0.0
    budget.spend(0, 1, gone(), object())
    assert budget.pause_seconds(0) == 0.0, "a token came in between"


def test_refusals_are_passed_on_twice():
    budget = RetryBudget(1)
    for number in range(MAX_REFUSALS):
        budget.spend(0, 0, NoCapacity("full"), number)
    with pytest.raises(NoCapacity):
        budget.spend(0, 0, NoCapacity("full"), "last")


def test_errors_that_no_worker_can_fix_are_reported_at_once():
    with pytest.raises(InvalidRequest):
        RetryBudget(1).spend(0, 0, InvalidRequest("bad", field="stop"), "first")
