"""The line through a worker's step times."""

import random

import pytest

from baton.router.learning.step_model import StepModel, drawn_to_fleet, fleet_times


def test_without_observations_nothing_is_predicted():
    model = StepModel()
    model.observe(0, 0.5)
    model.observe(5, 0.0)
    assert model.times is None


def test_one_observation_is_believed_with_the_prior_growth():
    model = StepModel()
    model.observe(10, 0.02)
    assert model.times.seconds(10) == pytest.approx(0.02)
    assert 0 < model.times.slope < 0.001


def test_learns_a_line_from_noisy_batches():
    draw = random.Random(1)
    model = StepModel()
    for _ in range(2000):
        n = draw.randint(1, 64)
        model.observe(n, (0.01 + 0.0005 * n) * draw.uniform(0.9, 1.1))
    assert model.times.slope == pytest.approx(0.0005, rel=0.15)
    assert model.times.base == pytest.approx(0.01, rel=0.25)


def test_a_stall_of_the_host_moves_little():
    model = StepModel()
    for _ in range(100):
        model.observe(8, 0.02)
    model.observe(8, 60.0)
    assert model.times.seconds(8) < 0.03


def test_an_idle_worker_that_looked_slow_is_estimated_like_the_others():
    """Its first steps had long prompts, and a worker that looks slow gets no requests that would correct that."""
    busy, idle = StepModel(), StepModel()
    for _ in range(3):
        idle.observe(4, 0.08)
    for _ in range(40):
        busy.observe(8, 0.006)
        idle.observe(0, 0.08)
    drawn = drawn_to_fleet(idle.times, fleet_times([busy.times, idle.times]))
    assert drawn.seconds(4) < 0.01
    for _ in range(40):
        idle.observe(4, 0.08)
    drawn = drawn_to_fleet(idle.times, fleet_times([busy.times, idle.times]))
    assert drawn.seconds(4) == pytest.approx(0.08, rel=0.1), "one that stays slow is slow"


def test_a_faster_step_is_believed_sooner_than_a_slower_one():
    faster, slower = StepModel(), StepModel()
    for _ in range(20):
        faster.observe(4, 0.02)
        slower.observe(4, 0.005)
    for _ in range(4):
        faster.observe(4, 0.005)
        slower.observe(4, 0.02)
    assert faster.times.seconds(4) < 0.007
    assert slower.times.seconds(4) < 0.010


def test_a_step_never_shrinks_with_its_batch():
    model = StepModel()
    for n in range(1, 200):
        model.observe(n % 50 + 1, 0.05 / (n % 50 + 1))
    assert model.times.slope >= 0
    assert model.times.base >= 0
