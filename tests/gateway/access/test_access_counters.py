"""What is counted by tenant: admitted, running, used and refused, for configured tenants and no more than so many."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry
from support.gateway.access_rig import tenant

from baton.gateway.access.counters import MAX_TENANTS, OTHERS, AccessCollector, AccessCounters
from baton.gateway.access.errors import RateLimited
from baton.gateway.access.gate import KeyGate
from baton.gateway.access.identity import Identity
from baton.gateway.access.keys.ring import KeyRing
from baton.gateway.access.limits.ledger import Ledger
from baton.gateway.access.limits.limiter import LocalLimiter
from baton.gateway.access.limits.usage import RequestCost, TokensUsed


@pytest.fixture
def counters():
    return AccessCounters()


@pytest.fixture
def gate(counters):
    return KeyGate(KeyRing(None, counters), LocalLimiter(Ledger(), counters, 1), counters)


@pytest.fixture
def value(counters):
    """A sample of the exposition."""
    registry = CollectorRegistry()
    registry.register(AccessCollector(counters))
    return lambda name, **labels: registry.get_sample_value(f"baton_gateway_tenant_{name}", labels)


@pytest.mark.parametrize("limits", [{}, {"requests_per_minute": 10}])
async def test_a_request_runs_and_is_settled_once(gate, value, limits):
    permit = await gate.admit(Identity(tenant("acme", **limits)), RequestCost(10, 20))
    assert value("requests_total", tenant="acme") == value("running", tenant="acme") == 1
    assert value("output_tokens_total", tenant="acme") == 0
    permit.settle(TokensUsed(10, 5))
    permit.settle(TokensUsed(10, 5))
    assert value("running", tenant="acme") == 0
    assert value("input_tokens_total", tenant="acme") == 10
    assert value("output_tokens_total", tenant="acme") == 5
    assert value("requests_total", tenant="rival") is None


async def test_a_refusal_counts_for_its_tenant_and_limit_and_admits_nothing(gate, value):
    who = Identity(tenant("acme", requests_per_minute=1, output_tokens_per_minute=50))
    await gate.admit(who, RequestCost(1, 1))
    with pytest.raises(RateLimited):
        await gate.admit(who, RequestCost(1, 1))
    with pytest.raises(RateLimited):
        await gate.admit(Identity(tenant("rival", output_tokens_per_minute=5)), RequestCost(1, 10))
    assert value("limited_total", tenant="acme", limit="requests") == 1
    assert value("limited_total", tenant="rival", limit="output_tokens") == 1
    assert value("requests_total", tenant="acme") == 1
    assert not value("requests_total", tenant="rival")


async def test_a_question_of_envoys_is_no_request(gate, value, counters):
    who = Identity(tenant("acme", requests_per_minute=1))
    await gate.admit(who, RequestCost(1, 1, dry_run=True))
    await gate.admit(who, RequestCost(1, 1))
    with pytest.raises(RateLimited):
        await gate.admit(who, RequestCost(1, 1, dry_run=True))
    assert value("requests_total", tenant="acme") == 1
    assert value("limited_total", tenant="acme", limit="requests") is None


async def test_however_many_tenants_there_are_the_series_are_bounded(gate, value, counters):
    for number in range(MAX_TENANTS + 50):
        await gate.admit(Identity(tenant(f"t{number}")), RequestCost(1, 1))
    await gate.admit(Identity(tenant("t0")), RequestCost(1, 1))
    assert len(counters.tenants) == MAX_TENANTS + 1
    assert value("requests_total", tenant=OTHERS) == 50
    assert value("requests_total", tenant="t0") == 2
