import math

from baton.services.simulate.cluster.metrics import LOST_SECONDS, LatencyLimits, Record, summarize

LIMITS = LatencyLimits(ttft=1.0, itl=0.05)


def record(arrived=0.0, ttft=0.5, itl=0.02, output=11, **values):
    first = arrived + ttft
    return Record(
        arrived, 100, output, first, first + itl * (output - 1), **{"worker_id": "w", "num_cached_tokens": 50, **values}
    )


def summary(*records, start=0.0, end=10.0):
    return summarize(records, LIMITS, start, end, policy="p", workload="w", num_workers=1, load=1.0, seed=0)


def test_a_request_is_good_within_both_limits():
    assert LIMITS.is_good(record())
    assert not LIMITS.is_good(record(ttft=1.1))
    assert not LIMITS.is_good(record(itl=0.06))
    assert LIMITS.is_good(record(itl=0.06, output=1))  # no gap between tokens
    assert not LIMITS.is_good(record(error="RESOURCE_EXHAUSTED"))
    assert not LIMITS.is_good(Record(0.0, 100))


def test_a_limit_may_grow_with_the_prompt():
    assert LatencyLimits(ttft=0.1, ttft_per_token=0.01).is_good(record(ttft=1.05))


def test_refused_and_unfinished_requests_count_as_offered_and_not_as_good():
    found = summary(record(), record(1.0), Record(2.0, 100, error="UNAVAILABLE"), Record(3.0, 100))
    assert (found.offered_per_second, found.completed_per_second, found.goodput_per_second) == (0.4, 0.2, 0.2)
    assert (found.good_share, found.num_refused, found.num_unfinished) == (0.5, 1, 1)
    assert found.latency_mean > LOST_SECONDS / 2


def test_only_arrivals_of_the_window_count():
    found = summary(record(0.0), record(5.0), record(10.0), start=1.0)
    assert found.num_requests == 1
    assert found.hit_rate == 0.5


def test_a_window_without_requests_has_no_figures():
    found = summary(start=1.0)
    assert found.offered_per_second == 0
    assert math.isnan(found.good_share)
    assert math.isnan(found.ttft_p99)
