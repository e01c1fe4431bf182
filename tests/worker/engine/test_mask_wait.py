"""How long steps wait for masks: never at others' cost."""

from __future__ import annotations

from dataclasses import replace

from baton.worker.engine.mask_wait import MaskWait, max_wait_seconds

ALONE = MaskWait(0.01, in_flight=False, others_can_run=False, advancing=True, woken=True)


def test_other_requests_lose_a_small_share_of_a_step_and_nothing_during_computation() -> None:
    busy = replace(ALONE, others_can_run=True)
    assert 0 < max_wait_seconds(busy) <= 0.05 * busy.step_seconds
    assert max_wait_seconds(busy) < max_wait_seconds(replace(busy, in_flight=True)) < busy.step_seconds
    assert max_wait_seconds(replace(busy, step_seconds=60.0)) < 0.01


def test_the_engine_waits_for_compilations_only_when_idle() -> None:
    compiling = replace(ALONE, advancing=False)
    assert max_wait_seconds(replace(compiling, others_can_run=True)) == 0
    assert max_wait_seconds(replace(compiling, in_flight=True)) == 0
    assert max_wait_seconds(compiling) == 0
    assert max_wait_seconds(replace(compiling, woken=False)) > 0
    assert max_wait_seconds(ALONE) > 0


def test_masks_of_a_step_that_the_device_computes_may_take_until_it_is_done() -> None:
    busy = replace(ALONE, in_flight=True, others_can_run=True, undrawn_seconds=0.008)
    assert 0.008 < max_wait_seconds(busy) < 0.009
    done = replace(busy, undrawn_seconds=0.0)
    assert 0 < max_wait_seconds(done) == max_wait_seconds(replace(done, undrawn_seconds=None))
    assert max_wait_seconds(replace(busy, advancing=False)) == 0
    assert max_wait_seconds(replace(busy, undrawn_seconds=60.0)) < 0.2
