"""A request between its admission and its settlement: once each, however its generations end."""

import pytest
from support.gateway.access_rig import tenant
from support.gateway.rest_harness import FakeGenerator

from baton.gateway.access.identity import Identity, Tenant, TenantLimits
from baton.gateway.access.limits.usage import RequestCost, TokensUsed
from baton.gateway.core import GenerationRequest, Usage
from baton.gateway.serving.tenancy import AdmittedGenerator
from baton.rpc.errors import NoCapacity
from baton.v1 import types_pb2


class BookGate:
    """Records admissions and settlements."""

    ready = True

    def __init__(self):
        self.asks, self.settled, self.refusal = [], [], None

    async def admit(self, identity, ask):
        self.asks.append(ask)
        if self.refusal is not None:
            raise self.refusal
        return self

    def settle(self, used):
        self.settled.append(used)

    def headers(self, anthropic=False):
        return {}


def request(num_tokens=10, max_tokens=None, n=1, priority=0):
    stop = types_pb2.StopConditions() if max_tokens is None else types_pb2.StopConditions(max_tokens=max_tokens)
    return GenerationRequest("r", "m", [7] * num_tokens, stop=stop, n=n, priority=priority)


def admitted(gate, inner, *requests, who=None, max_model_len=2048):
    return AdmittedGenerator(inner, gate, Identity(who or Tenant("acme")), requests, max_model_len)


async def test_all_prompts_are_admitted_together_and_settled_when_the_last_has_ended():
    gate, inner = BookGate(), FakeGenerator()
    requests = [request(10, 5), request(20, 5, n=3)]
    generator = admitted(gate, inner, *requests)
    for one in requests:
        await generator.start(one, None)
    assert gate.asks == [RequestCost(30, 20)]
    generator.close()
    generator.close()
    inner.started[0].request.on_end(Usage(10, 4, 0))
    assert not gate.settled
    inner.started[1].request.on_end(Usage(20, 9, 0))
    inner.started[1].request.on_end(Usage(20, 9, 0))  # an end that is told twice
    assert gate.settled == [TokensUsed(30, 13)]


async def test_an_answer_that_outlives_its_exchange_is_settled_at_its_own_end():
    gate, inner = BookGate(), FakeGenerator()
    generator = admitted(gate, inner, request())
    await generator.start(request(), None)
    generator.close()
    assert not gate.settled
    inner.started[0].request.on_end(Usage(10, 1, 0))
    assert gate.settled == [TokensUsed(10, 1)]


async def test_a_failed_start_returns_unrun_work():
    gate, inner = BookGate(), FakeGenerator()
    requests = [request(10, 5), request(20, 5)]
    generator = admitted(gate, inner, *requests)
    await generator.start(requests[0], None)
    inner.refusal = NoCapacity("full")
    with pytest.raises(NoCapacity):
        await generator.start(requests[1], None)
    inner.started[0].request.on_end(Usage(10, 2, 0))
    generator.close()
    assert gate.settled == [TokensUsed(10, 2)]


async def test_a_refused_request_starts_nothing_and_settles_nothing():
    gate, inner = BookGate(), FakeGenerator()
    gate.refusal = NoCapacity("over the limit")
    generator = admitted(gate, inner, request())
    with pytest.raises(NoCapacity):
        await generator.start(request(), None)
    generator.close()
    assert (inner.started, gate.settled) == ([], [])


async def test_reservations_never_exceed_the_context():
    for one, who, output in (
        (request(10, 5000), Tenant("a"), 90),
        (request(10), Tenant("a", assumed_output_tokens=30), 30),
        (request(10), Tenant("a", assumed_output_tokens=30, limits=TenantLimits(output_tokens_per_minute=20)), 20),
        (request(10, n=2), Tenant("a"), 180),
    ):
        gate = BookGate()
        await admitted(gate, FakeGenerator(), one, who=who, max_model_len=100).start(one, None)
        assert gate.asks == [RequestCost(10, output)]


async def test_requests_are_their_tenants_and_cannot_pass_by_others():
    who = Tenant("acme", salt="s", weight=2.0, priority=3)
    for asked, given in ((-7, 3), (0, 3), (4, 7), (2**31 - 1, 2**31 - 1)):
        inner = FakeGenerator()
        await admitted(BookGate(), inner, request(), who=who).start(request(priority=asked), None)
        sent = inner.started[0].request
        assert (sent.tenant, sent.tenant_salt, sent.tenant_weight, sent.priority) == ("acme", "s", 2.0, given)
    inner = FakeGenerator()
    await admitted(BookGate(), inner, request(), who=Tenant()).start(request(priority=-7), None)
    assert inner.started[0].request.priority == -7


def test_a_share_never_turns_a_limit_into_none():
    assert tenant(requests_per_minute=1, tokens_per_month=10).limits.share(100) == TenantLimits(1, 0, 0, 0, 1)
