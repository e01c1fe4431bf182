"""How long steps wait for masks: never at others' cost."""

from __future__ import annotations

from dataclasses import replace

from baton.worker.engine.mask_wait import MaskWait, mask_patience

ALONE = MaskWait(0.01, in_flight=False, others_can_run=False, advancing=True, woken=True)


def test_others_lose_a_small_share_of_a_step_and_nothing_while_the_device_computes() -> None:
    busy = replace(ALONE, others_can_run=True)
    assert 0 < mask_patience(busy) <= 0.05 * busy.step_seconds
    assert mask_patience(busy) < mask_patience(replace(busy, in_flight=True)) < busy.step_seconds
    assert mask_patience(replace(busy, step_seconds=60.0)) < 0.01


def test_compilations_are_waited_for_only_by_who_has_nothing_else_to_do() -> None:
    compiling = replace(ALONE, advancing=False)
    assert mask_patience(replace(compiling, others_can_run=True)) == 0
    assert mask_patience(replace(compiling, in_flight=True)) == 0
    assert mask_patience(compiling) == 0
    assert mask_patience(replace(compiling, woken=False)) > 0
    assert mask_patience(ALONE) > 0
