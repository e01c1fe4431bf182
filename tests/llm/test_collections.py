"""Garbage is collected rarely while prompts run, and as before afterwards."""

from __future__ import annotations

import gc

from baton.llm import SamplingParams
from baton.llm.garbage import rare_collections

SHORT = SamplingParams(temperature=0, max_tokens=2)


def test_the_thresholds_are_the_callers_again(llm) -> None:
    before = gc.get_threshold()
    outputs = llm.generate_iter(["One", "Two"], SHORT)
    next(outputs)
    assert gc.get_threshold()[0] > before[0]
    outputs.close()
    assert gc.get_threshold() == before


def test_a_process_that_collects_more_rarely_stays_so() -> None:
    before = gc.get_threshold()
    try:
        for threshold in (0, 1_000_000):
            gc.set_threshold(threshold)
            with rare_collections():
                assert gc.get_threshold()[0] == threshold
            assert gc.get_threshold()[0] == threshold
    finally:
        gc.set_threshold(*before)
