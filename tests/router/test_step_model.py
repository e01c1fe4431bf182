"""The line through a worker's step times."""

import random

import pytest

from baton.router.step_model import StepModel


def test_nothing_observed_is_nothing_known():
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


def test_a_step_never_shrinks_with_its_batch():
    model = StepModel()
    for n in range(1, 200):
        model.observe(n % 50 + 1, 0.05 / (n % 50 + 1))
    assert model.times.slope >= 0
    assert model.times.base >= 0
