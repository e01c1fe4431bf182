"""Times between a response's tokens: one for each delta of a stream, one for each token of a complete answer."""

import pytest

from baton.gateway.metrics import gateway as metrics_module
from baton.gateway.metrics.counters import GenerationCounters
from baton.gateway.metrics.gateway import AnswerMeter, GatewayMetrics


@pytest.mark.parametrize(("num_tokens", "expected"), [(1, (1, 0.32)), (32, (32, 0.01))])
def test_tokens_that_arrive_together_count_with_their_mean(monkeypatch, num_tokens, expected):
    now = [10.0]
    monkeypatch.setattr(metrics_module.time, "perf_counter", lambda: now[0])
    metrics = GatewayMetrics(GenerationCounters(), lambda: 0.0, lambda: 0.0)
    meter = AnswerMeter(metrics, 9.0, 1)
    meter.on_tokens(0)
    now[0] += 0.32
    meter.on_tokens(0, num_tokens)
    count, mean = expected
    assert metrics.itl.cumulative()[-1] == ("+Inf", count)
    assert metrics.itl.sum == pytest.approx(count * mean)
    assert sum(number for bound, number in metrics.itl.cumulative() if float(bound) < mean) == 0
