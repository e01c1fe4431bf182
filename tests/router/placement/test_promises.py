"""Objectives of streams, how far they are met, and refusals that protect them."""

import random
from dataclasses import replace

import pytest
from support.fleet.router_views import RATES, demand, snapshot

from baton.router.placement import costs
from baton.router.placement.decision import Asked, admitted
from baton.router.placement.policy import Option
from baton.router.placement.promises import Kept, Promise, Promises, promise_of
from baton.router.placement.worker_snapshot import Objectives, Traffic
from baton.router.requests.in_flight import TenantLoad
from baton.rpc.errors import NoCapacity
from baton.v1 import types_pb2

TRAFFIC = Traffic(num_output_tokens=100.0)
LIMITS = Objectives(ttft_seconds=1.0, itl_seconds=0.05, sheds=True)


def option(decode, asked):
    cost = costs.local(decode, asked, costs.decode_alone(decode, asked, 0.02))
    return Option(decode, None, cost, sum(cost), 0)


def gain(promises, decode, asked):
    cost = option(decode, asked).costs
    return promises.gain(decode, None, cost, asked, LIMITS, TRAFFIC)


@pytest.fixture
def promises():
    """After outcomes that came as promised, within a fifth."""
    made, draw = Promises(), random.Random(1)
    for _ in range(500):
        first, between = draw.uniform(0.05, 2.0), draw.uniform(0.01, 0.2)
        off = draw.uniform(0.8, 1.25)
        made.observe(Promise(first, between), first * off, between * off)
    return made


def test_a_promise_grows_with_the_batch_and_with_the_prompts_before():
    idle = promise_of(*_parts(snapshot()))
    busy = promise_of(*_parts(snapshot(num_running=60, num_pending_prefill_tokens=5000)))
    stalled = promise_of(*_parts(snapshot()._replace(stalled_part=0.5)))
    assert busy.between > idle.between
    assert busy.first_token == pytest.approx(idle.first_token + 0.5)
    assert stalled.between == pytest.approx(2 * idle.between)


def test_a_worker_that_has_no_prompts_now_is_promised_those_to_come():
    idle, (decode, costs_of, asked, traffic) = promise_of(*_parts(snapshot())), _parts(snapshot())
    busy_fleet = promise_of(decode, costs_of, asked, traffic._replace(lasting_stall=0.5))
    assert busy_fleet.between == pytest.approx(2 * idle.between)
    already = promise_of(decode._replace(stalled_part=0.6), costs_of, asked, traffic._replace(lasting_stall=0.5))
    assert already.between == pytest.approx(2.5 * idle.between)


def _parts(decode):
    asked = demand()
    return decode, option(decode, asked).costs, asked, TRAFFIC


def test_how_promises_are_kept_is_learnt():
    kept, draw = Kept(), random.Random(2)
    for _ in range(2000):
        promised = draw.uniform(0.01, 0.1)
        kept.observe(promised, 2.0 * promised * draw.lognormvariate(0.0, 0.3))
    assert kept.spread == pytest.approx(0.3, rel=0.3)
    assert kept.distance(0.025, 0.05) == pytest.approx(0.0, abs=0.5)
    assert kept.distance(0.01, 0.05) > 2
    assert kept.distance(0.1, 0.05) < -2
    before = kept.num_outcomes
    kept.observe(0.0, 1.0)
    kept.observe(1.0, 0.0)
    assert kept.num_outcomes == before


def test_a_quick_fleet_does_not_forget_sooner():
    def kept_after(per_second):
        kept = Kept()
        for number in range(1000):
            kept.observe(0.01, 0.02, now=number / per_second)
        last = 1000 / per_second
        for number in range(round(per_second)):
            kept.observe(0.01, 0.04, now=last + number / per_second)
        return kept.distance(0.01, 0.02)

    assert kept_after(10.0) == pytest.approx(kept_after(500.0), abs=0.5), "a second of outcomes, however many"


def test_a_short_stream_has_less_weight_than_a_long_one():
    short, long = Kept(), Kept()
    for kept, part in ((short, 0.1), (long, 1.0)):
        for _ in range(20):
            kept.observe(0.01, 0.01)
        for _ in range(5):
            kept.observe(0.01, 0.04, part=part)
    assert short.distance(0.01, 0.05) > long.distance(0.01, 0.05)


def test_an_idle_worker_takes_everything(promises):
    assert gain(promises, snapshot(), demand(4000)) > 0.9
    assert gain(promises, snapshot(), demand(100_000)) > 0, "a prompt that is never in time is not expected to be"


def test_a_worker_at_its_limit_accepts_cheap_requests_and_refuses_others(promises):
    full = snapshot(num_running=60, num_free_blocks=2000)._replace(stalled_part=0.1)
    assert gain(promises, full, demand(16_000)) < 0
    assert gain(promises, full._replace(num_cached_tokens=15_900), demand(16_000)) > 0


def test_no_request_is_refused_on_a_guess():
    asked = Asked(types_pb2.ModelInfo(name="m"), demand(30_000))
    guessed = snapshot(num_running=60, rates=replace(RATES, is_measured=False))._replace(stalled_part=0.8)
    full = option(guessed, asked.demand)
    assert admitted([full], asked, Promises(), LIMITS, TRAFFIC, {}) == [full]


def test_the_first_option_that_adds_is_taken_or_the_request_is_refused_with_numbers(promises):
    asked = Asked(types_pb2.ModelInfo(name="m"), demand(16_000))
    full = option(snapshot("full", num_running=60)._replace(stalled_part=0.5), asked.demand)
    free = option(snapshot("free"), asked.demand)
    assert admitted([full, free], asked, promises, LIMITS, TRAFFIC, {}) == [free, full]
    with pytest.raises(NoCapacity, match="ms would pass between tokens") as refused:
        admitted([full], asked, promises, LIMITS, TRAFFIC, {})
    assert refused.value.retry_after_ms >= 1000


def test_where_all_is_late_nothing_more_is_taken(promises):
    """One more would spoil nothing there; but it would keep those to come waiting."""
    late = snapshot(num_running=60, num_pending_prefill_tokens=100_000)._replace(stalled_part=0.9)
    assert gain(promises, late, demand(100)) < 0


def waiting(seconds):
    """A worker whose queue is so long."""
    return snapshot(num_pending_prefill_tokens=round(seconds * RATES.prefill_tokens_per_second))


def admit(decode, asked, tenants=None):
    return admitted([option(decode, asked.demand)], asked, Promises(), LIMITS, TRAFFIC, tenants or {})


def asked_by(tenant="", weight=1.0, priority=0):
    return Asked(types_pb2.ModelInfo(name="m"), demand(100), tenant, weight, priority)


def test_a_wait_that_takes_more_than_half_of_the_objective_is_refused_with_a_time():
    assert admit(waiting(0.4), asked_by())
    with pytest.raises(NoCapacity, match=r"of them in a queue") as refused:
        admit(waiting(0.7), asked_by())
    assert refused.value.retry_after_ms >= 500


def test_requests_with_less_priority_are_refused_first():
    with pytest.raises(NoCapacity):
        admit(waiting(0.4), asked_by(priority=1))
    assert admit(waiting(0.2), asked_by(priority=1))


def test_where_requests_wait_a_tenant_has_its_share_and_no_more():
    tenants = {"small": TenantLoad(1.0, 5000, 10), "large": TenantLoad(4.0, 5000, 10)}
    assert admit(snapshot(), asked_by("small"), tenants), "while nobody waits all may have everything"
    with pytest.raises(NoCapacity, match="tenant 'small' has 5000 tokens in 10 requests"):
        admit(waiting(0.2), asked_by("small"), tenants)
    assert admit(waiting(0.4), asked_by("large", 4.0), tenants)
    assert admit(waiting(0.4), asked_by("small"), {"small": tenants["small"]}), "alone, it has everything"
