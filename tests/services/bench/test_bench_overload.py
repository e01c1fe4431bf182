"""The overload benchmark's figures, from records of clients and the gateway."""

from __future__ import annotations

from bench.fleet.bench_overload import _TENANTS, Phase, figures_of
from bench.fleet.overload_client import Seen


def answered(tenant: str, first: float, between: float, num_tokens: int = 5) -> Seen:
    tokens = [10.0 + first + at * between for at in range(num_tokens)]
    return Seen(tenant, 10.0, 200, head=10.0 + first, tokens=tokens, ended=tokens[-1])


def test_only_complete_answers_within_both_objectives_are_good():
    broken = answered("large", 0.2, 0.1)
    broken.ended = 0.0
    seen = [answered("small", 0.5, 0.1), answered("middle", 1.5, 0.1), answered("large", 0.2, 0.3), broken]
    refused = [Seen("small", 10.0, 429, True, 10.004), Seen("small", 10.0, 503, False, 10.002)]
    phase = Phase(3.0, [*seen, *refused], 2.0, 7, [(0.002, 1.0), (0.005, 2.0)])
    found = figures_of(phase, 1.0)
    assert (found["goodput"], found["of peak"]) == (0.5, 0.5)
    assert (found["ttft kept"], found["itl kept"]) == (0.75, 0.75)
    assert (found["429"], found["503"], found["without Retry-After"], found["other failures"]) == (1, 1, 1, 1)
    assert (found["gateway p50"], found["gateway p99"]) == ("<= 2", "<= 5")
    assert found["shares"] == {one.name: share for one, share in zip(_TENANTS, (0.25, 0.25, 0.5), strict=True)}
