"""How long answers are taken to be, while most of them go on."""

import heapq
import random

import pytest

from baton.router.learning.output_lengths import OutputLengths

PACE = 0.03  # seconds between tokens
MEDIAN, SIGMA = 250.0, 0.8
MEAN = 344.3  # of such a lognormal distribution


def serve(lengths: OutputLengths, seconds: float, per_second: float, seed: int = 1, start: float = 0.0) -> list[int]:
    """Requests that come evenly and are answered at one pace. Returns the lengths of the answers that ended."""
    draw, under_way, ended = random.Random(seed), [], []

    def end_until(now: float) -> None:
        while under_way and under_way[0][0] <= now:
            at, number, num_tokens = heapq.heappop(under_way)
            lengths.end("m", number, num_tokens, at)
            ended.append(num_tokens)

    for number in range(int(seconds * per_second)):
        now = start + number / per_second
        end_until(now)
        num_tokens = max(1, round(draw.lognormvariate(0.0, SIGMA) * MEDIAN))
        lengths.begin("m", seed * 1_000_000 + number, now)
        heapq.heappush(under_way, (now + num_tokens * PACE, seed * 1_000_000 + number, num_tokens))
    end_until(start + seconds)
    return ended


def test_without_observations_no_length_is_predicted_and_max_tokens_bounds_it():
    lengths = OutputLengths()
    assert lengths.expected("m", 0) == 128
    assert lengths.expected("m", 50) == 50
    assert lengths.expected("m", 5000) == 128


@pytest.mark.parametrize("per_second", [50, 500, 2000])
@pytest.mark.parametrize("seconds", [8, 16, 40])
def test_a_fleet_that_has_just_begun_does_not_take_its_answers_for_short(seconds, per_second):
    lengths = OutputLengths()
    ended = serve(lengths, seconds, per_second)
    assert lengths.expected("m", 0) == pytest.approx(MEAN, rel=0.3)
    if seconds == 8:
        assert sum(ended) / len(ended) < 0.4 * MEAN, "those that ended are the short ones"


def test_other_answers_are_learnt_within_some_of_them():
    lengths = OutputLengths()
    for number in range(2000):
        lengths.begin("m", number, float(number))
        lengths.end("m", number, 1000 if number < 1000 else 50, number + 0.5)
        if number == 999:
            assert lengths.expected("m", 0) == pytest.approx(1000, rel=0.1)
    assert lengths.expected("m", 0) == pytest.approx(50, rel=0.2)


def test_models_do_not_teach_each_other():
    lengths = OutputLengths()
    serve(lengths, 20, 50)
    assert lengths.expected("other", 0) == 128


def test_other_ends_and_unreported_placements_are_not_learned_from():
    lengths = OutputLengths()
    for number in range(1000):
        lengths.begin("m", number, float(number))
        if number % 50:
            lengths.end("m", number, 0 if number % 3 == 0 else 100, number + 3.0)
    assert lengths.expected("m", 0) == pytest.approx(100, rel=0.15)


def test_reports_on_unknown_or_ended_placements_change_nothing():
    lengths = OutputLengths()
    lengths.begin("m", 1, 0.0)
    lengths.end("m", 1, 100, 1.0)
    known = lengths.expected("m", 0)
    lengths.end("m", 1, 9000, 10.0)
    lengths.end("m", 2, 9000, 20.0)
    assert lengths.expected("m", 0) == known


def test_only_the_last_answers_are_kept():
    lengths = OutputLengths()
    for number in range(40_000):
        lengths.begin("m", number, number / 1000)
    assert len(lengths._models["m"].answers) <= 16_384
