"""The timing attack by computed tokens, which load does not change. The program uses the clock."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
from timing_attack import ATTACKER, NO_BETTER_THAN, VICTIM, Attack, Sample, auc, chat, start

TRIALS = 4
NUM_WORDS = 400


def samples_of(folder: Path, executor: str, salts: bool) -> list[Sample]:
    with ExitStack() as cleanup:
        stack, keys = start(folder, cleanup, executor, salts)
        return Attack(stack, keys, chat, seed=7).run(TRIALS, NUM_WORDS)


@pytest.mark.parametrize("executor", ["cpu", "sim"])
def test_a_text_of_another_tenant_costs_as_much_as_a_new_one(tmp_path: Path, executor: str):
    samples = samples_of(tmp_path, executor, salts=True)
    assert {one.cached_tokens for one in samples if one.tenant == ATTACKER} == {
        min(one.cached_tokens for one in samples)
    }
    for number in (lambda one: one.computed_tokens, lambda one: -one.cached_tokens):
        assert auc(samples, VICTIM, number).value == 1.0, "the attack works within one tenant"
    assert auc(samples, ATTACKER, lambda one: -one.cached_tokens).value == 0.5 <= NO_BETTER_THAN
    fresh = [one.computed_tokens for one in samples if not one.sent]
    taken = [one.computed_tokens for one in samples if one.sent and one.tenant == ATTACKER]
    assert min(taken) > 0.9 * min(fresh)
    assert min(fresh) > NUM_WORDS / 2


def test_tenants_that_the_operator_gave_one_salt_share(tmp_path: Path):
    samples = samples_of(tmp_path, "sim", salts=False)
    assert auc(samples, ATTACKER, lambda one: -one.cached_tokens).value == 1.0


def test_auc_counts_smaller_values():
    def made(sent: bool, *seconds: float) -> list[Sample]:
        return [Sample("t", sent, one, 0, 0) for one in seconds]

    def of(sent: list[Sample], fresh: list[Sample]) -> float:
        return auc([*sent, *fresh], "t", lambda one: one.seconds).value

    assert of(made(True, 1, 2), made(False, 3, 4)) == 1.0
    assert of(made(True, 3, 4), made(False, 1, 2)) == 0.0
    assert of(made(True, 1, 1), made(False, 1, 1)) == 0.5
    assert of(made(True, 1, 4), made(False, 2, 3)) == 0.5
    many = auc([*made(True, *range(1000)), *made(False, *range(1000))], "t", lambda one: one.seconds)
    assert many.low < 0.5 < many.high
    assert many.high - many.low < 0.06
