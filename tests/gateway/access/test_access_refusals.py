"""Requests that are refused, and texts that are only counted, count against their tenant's limits."""

import asyncio

import pytest
from support.gateway.access_rig import tenant
from support.gateway.rest_harness import INFO, SAMPLE, FakeGenerator, RawClient, say

from baton.gateway.access.counters import AccessCounters
from baton.gateway.access.errors import RateLimited
from baton.gateway.access.gate import KeyGate
from baton.gateway.access.identity import Identity
from baton.gateway.access.keys.ring import KeyRing
from baton.gateway.access.limits.ledger import Ledger
from baton.gateway.access.limits.limiter import LocalLimiter
from baton.gateway.access.refusals import LARGE_BODY, Refusals
from baton.gateway.config import GatewayConfig
from baton.gateway.grpc.responses.calls import ResponseCalls
from baton.gateway.grpc.servicer import InferenceServicer
from baton.gateway.http.server import HttpServer
from baton.gateway.metrics.counters import GenerationCounters
from baton.gateway.metrics.gateway import GatewayMetrics
from baton.gateway.models.served import ModelCatalog, load_served_model
from baton.gateway.responses.service import ResponseService
from baton.gateway.responses.store import ResponseStore
from baton.gateway.rest.app import App
from baton.gateway.rest_routes import rest_routes
from baton.gateway.serving.admission import ConcurrencyLimiter
from baton.gateway.serving.context import ServingContext
from baton.gateway.storage.store import MemoryRecordStore
from baton.rpc.errors import InvalidRequest, NotFound
from baton.v1 import inference_pb2, response_pb2


class OneTenant(KeyGate):
    """Everybody is one tenant, whose limits are in this process."""

    def __init__(self, **limits):
        self.ledger = Ledger()
        self.identity = Identity(tenant(**limits))
        counters = AccessCounters()
        super().__init__(KeyRing(None, counters), LocalLimiter(self.ledger, counters, 1), counters)

    def identify(self, keys, scope=None):
        return self.identity

    @property
    def requests(self):
        return self.ledger.status(self.ledger.account("acme")).requests

    @property
    def account(self):
        return self.ledger.account("acme")


@pytest.fixture(scope="module")
def catalog():
    catalog = ModelCatalog([load_served_model(str(SAMPLE))])
    catalog.update([INFO])
    return catalog


@pytest.fixture
async def rest(catalog):
    """Asks a gateway with these limits; returns the status and the error's type."""
    gate = OneTenant(requests_per_minute=40, concurrent_requests=1)
    admission, responses = ConcurrencyLimiter(100), ResponseStore(MemoryRecordStore(60, 1 << 20))
    metrics = GatewayMetrics(GenerationCounters(), lambda: 0, lambda: 0)
    serving = ServingContext(
        GatewayConfig(model=str(SAMPLE)), catalog, FakeGenerator(say("Hi")), admission, metrics, gate
    )
    async with HttpServer("127.0.0.1:0", App(rest_routes(serving, responses, list), metrics, gate)) as server:

        async def ask(path, body):
            async with RawClient.connect(server.port) as client:
                answer = await client.request("POST", path, body)
            await asyncio.sleep(0.02)  # what counts is counted beside the answer
            return answer.status

        ask.gate = gate
        yield ask
    await responses.close(0)


def chat(text, **fields):
    return {"messages": [{"role": "user", "content": text}], **fields}


CHATS, TOKENIZE = "/v1/chat/completions", "/tokenize"
LONG = "dog " * LARGE_BODY


@pytest.mark.parametrize(
    ("path", "body", "status", "counted"),
    [
        (CHATS, chat("Hi"), 200, 1),  # once, not twice
        (CHATS, chat("Hi", top_p=7), 400, 1),
        (CHATS, chat("Hi", model="none"), 404, 1),
        (CHATS, b"{", 400, 1),
        (CHATS, chat(LONG), 400, 1),
        (CHATS, chat("1" * (3 << 20)), 400, 4),
        ("/v1/completions", {"prompt": "1" * (3 << 20)}, 400, 4),
        (TOKENIZE, {"prompt": "Hi"}, 200, 0),
        (TOKENIZE, {"prompt": LONG}, 200, 1),
        (TOKENIZE, {"prompt": "1" * (9 << 20)}, 400, 10),
        ("/detokenize", {"tokens": [500] * LARGE_BODY}, 200, 1),
        ("/v1/messages/count_tokens", chat(LONG, model="storyteller-7m"), 400, 1),
        ("/v1/responses", {"input": LONG}, 400, 1),
    ],
)
async def test_the_counted_cost_of_requests(rest, path, body, status, counted):
    assert await rest(path, body) == status
    assert rest.gate.requests == counted
    # The fake generator does not tell that its generation has ended.
    assert rest.gate.account.running == (path == CHATS and status == 200)


async def test_a_tenant_over_its_limit_has_no_large_body_read(rest, monkeypatch):
    for _ in range(11):
        await rest(TOKENIZE, {"prompt": "1" * (4 << 20)})
    assert rest.gate.requests == 40
    monkeypatch.setattr("baton.gateway.bodies.decoder.BodyDecoder.decode", None)
    assert await rest(CHATS, chat(LONG)) == 429
    assert await rest(TOKENIZE, {"prompt": LONG}) == 429


async def test_a_refused_request_counts_beside_as_many_as_may_run(rest):
    rest.gate.account.running = 1
    assert await rest(CHATS, chat("Hi", top_p=7)) == 400
    assert rest.gate.requests == 1
    assert rest.gate.account.running == 1


class Context:
    def invocation_metadata(self):
        return ()

    def add_done_callback(self, _):
        """No call ends here."""

    def peer(self):
        return "ipv4:127.0.0.1:5000"


async def test_calls_count_alike(catalog):
    gate = OneTenant(requests_per_minute=3)
    servicer = InferenceServicer(FakeGenerator(), catalog, gate=gate)
    wrong = inference_pb2.GenerateRequest(text="1" * (4 * LARGE_BODY))
    with pytest.raises(InvalidRequest):
        await anext(aiter(servicer.Generate(wrong, Context())))
    await servicer.Tokenize(inference_pb2.TokenizeRequest(text=LONG), Context())
    await servicer.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[500] * LARGE_BODY), Context())
    await asyncio.sleep(0.02)
    assert gate.requests == 3
    with pytest.raises(RateLimited):
        await servicer.Tokenize(inference_pb2.TokenizeRequest(text=LONG), Context())
    with pytest.raises(RateLimited):
        await anext(aiter(servicer.Generate(wrong, Context())))


async def test_a_gateway_without_limits_counts_nothing(catalog):
    gate = OneTenant()
    refusals = Refusals(gate)
    assert not refusals.must_check(gate.identity, 1 << 24)
    refusals.count_response(gate.identity, 400, 1 << 24, admitted=False)
    await asyncio.sleep(0.01)
    assert gate.requests == 0


class ResponseContext(Context):
    def peer(self):
        return "ipv4:127.0.0.1:1"

    async def send_initial_metadata(self, _):
        """Sends nothing: there is no client."""


async def test_a_refused_response_counts_once(catalog):
    gate, generator = OneTenant(requests_per_minute=6), FakeGenerator(say("Hi"))
    responses = ResponseStore(MemoryRecordStore(60, 1 << 20))
    metrics = GatewayMetrics(GenerationCounters(), lambda: 0, lambda: 0)
    serving = ServingContext(GatewayConfig(model=str(SAMPLE)), catalog, generator, ConcurrencyLimiter(9), metrics, gate)
    calls = ResponseCalls(ResponseService(serving, responses))
    servicer = InferenceServicer(generator, catalog, gate=gate, responses=calls)

    async def ask(text, **fields):
        said = response_pb2.ResponseItem(message=response_pb2.ItemMessage(role="user", text=text))
        request = inference_pb2.CreateResponseRequest(input=[said], **fields)
        events = [event async for event in servicer.CreateResponse(request, ResponseContext())]
        await asyncio.sleep(0.02)
        return events

    assert await ask("Hi")
    assert gate.requests == 1
    for refused in (lambda: ask(LONG), lambda: ask("Hi", model="none"), lambda: ask("Hi", previous_response_id="x")):
        with pytest.raises((InvalidRequest, NotFound)):
            await refused()
        await asyncio.sleep(0.02)
    assert gate.requests == 4
    generator.refusal = InvalidRequest("no")  # after it was admitted, and so counted
    with pytest.raises(InvalidRequest):
        await ask("Hi")
    assert gate.requests == 5
    with pytest.raises(InvalidRequest):
        await ask(LONG)
    await asyncio.sleep(0.02)
    with pytest.raises(RateLimited):
        await ask(LONG)
    await responses.close(0)
