from __future__ import annotations

import pytest

from baton.worker.scheduling.rates import Rates


def test_no_rate_is_known_before_the_first_step():
    rates = Rates()
    assert (rates.decode_step_seconds, rates.prefill_tokens_per_second) == (0.0, 0.0)
    rates.observe(0, 0, 1.0)
    rates.observe(100, 0, 0.0)
    assert (rates.decode_step_seconds, rates.prefill_tokens_per_second) == (0.0, 0.0)


def test_decode_time_follows_the_load():
    rates = Rates()
    for _ in range(100):
        rates.observe(0, 8, 0.010)
    for _ in range(100):
        rates.observe(0, 64, 0.020)
    assert rates.decode_step_seconds == pytest.approx(0.020, rel=0.02)


def test_one_stall_does_not_change_the_picture():
    rates = Rates()
    for _ in range(50):
        rates.observe(0, 8, 0.010)
        rates.observe(2048, 0, 0.050)
    rates.observe(0, 8, 10.0)
    rates.observe(2048, 0, 10.0)
    assert rates.decode_step_seconds < 0.015
    assert rates.prefill_tokens_per_second > 2048 / 0.050 / 3


def test_prefill_speed_leaves_out_the_decodes_of_mixed_steps():
    rates = Rates()
    rates.observe(0, 64, 0.020)
    for _ in range(20):
        rates.observe(1000, 64, 0.020 + 0.025)
    assert rates.prefill_tokens_per_second == pytest.approx(40_000, rel=0.01)


def test_long_chunks_count_more_than_short_ones():
    rates = Rates()
    for _ in range(20):
        rates.observe(8000, 0, 0.2)
        rates.observe(10, 0, 0.005)
    assert rates.prefill_tokens_per_second == pytest.approx(40_000, rel=0.05)


def test_a_worker_without_pure_decode_steps_learns_its_decode_time_from_mixed_ones():
    rates = Rates()
    rates.observe(8000, 0, 0.2)
    for _ in range(20):
        rates.observe(4000, 30, 0.1 + 0.015)
    assert rates.decode_step_seconds == pytest.approx(0.015, rel=0.01)
    assert rates.prefill_tokens_per_second == pytest.approx(40_000, rel=0.01)
    for _ in range(20):
        rates.observe(0, 30, 0.008)
    assert rates.decode_step_seconds == pytest.approx(0.008)
