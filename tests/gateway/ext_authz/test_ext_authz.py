"""Authorization/Check with a real gate on a real port: allowed and denied clients, without reservations."""

from __future__ import annotations

import json
from dataclasses import dataclass

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.gateway.access_rig import key_file
from support.gateway.rest_harness import SAMPLE, FakeGenerator
from support.network.tls_rig import dial_as, make_certs, tls_of

from baton.envoy.external_auth_pb2 import AttributeContext, CheckRequest, CheckResponse
from baton.envoy.external_auth_pb2_grpc import AuthorizationStub
from baton.gateway.access.counters import AccessCounters
from baton.gateway.access.credential import keys_in_headers
from baton.gateway.access.factory import open_gate
from baton.gateway.access.gate import Gate
from baton.gateway.access.identity import Scope
from baton.gateway.access.limits.usage import RequestCost
from baton.gateway.access.settings import AccessSettings
from baton.gateway.config import GatewayConfig
from baton.gateway.ext_authz.rules import RequestHead, Requirement, Rules
from baton.gateway.ext_authz.server import ext_authz_server
from baton.gateway.ext_authz.service import ExtAuthzCollector, ExtAuthzServicer
from baton.gateway.metrics.counters import GenerationCounters
from baton.gateway.metrics.gateway import GatewayMetrics
from baton.gateway.models.served import ModelCatalog, load_served_model
from baton.gateway.responses.store import ResponseStore
from baton.gateway.rest.routing import RouteTable
from baton.gateway.rest_routes import rest_routes
from baton.gateway.serving.admission import ConcurrencyLimiter
from baton.gateway.serving.context import ServingContext
from baton.gateway.storage.store import MemoryRecordStore
from baton.rpc.errors import InvalidRequest, Unavailable
from baton.rpc.identity.identity import ENVOY, GATEWAY, OPERATOR, ROUTER, WORKER

KEYS = {
    "good": {"tenant": "acme"},
    "metrics": {"scopes": ["metrics"]},
    "admin": {"scopes": ["admin"]},
    "limited": {"tenant": "limited"},
}
TENANTS = {"acme": {}, "limited": {"requests_per_minute": 1}}
GENERATE = "/baton.v1.InferenceService/Generate"
GRPC = {"content-type": "application/grpc"}
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def rules():
    config = GatewayConfig(model=str(SAMPLE))
    catalog = ModelCatalog([load_served_model(str(SAMPLE))])
    metrics = GatewayMetrics(GenerationCounters(), lambda: 0, lambda: 0)
    serving = ServingContext(config, catalog, FakeGenerator(), ConcurrencyLimiter(1), metrics)
    return Rules(RouteTable(rest_routes(serving, ResponseStore(MemoryRecordStore(60, 1 << 20)), list)))


@dataclass
class Asked:
    """A servicer at a port, as Envoy asks it."""

    servicer: ExtAuthzServicer
    gate: Gate
    keys: dict[str, str]
    channel: grpc.aio.Channel

    async def check(self, method: str, path: str, key: str = "", **headers: str) -> CheckResponse:
        fields = {name.replace("_", "-"): value for name, value in headers.items()}
        if key:
            fields["authorization"] = f"Bearer {self.keys.get(key, key)}"
        http = AttributeContext.HttpRequest(method=method, path=path, headers=fields)
        request = CheckRequest(attributes=AttributeContext(request=AttributeContext.Request(http=http)))
        return await AuthorizationStub(self.channel).Check(request, timeout=20)


@pytest.fixture
async def asked(tmp_path, rules):
    path, secrets = key_file(tmp_path, list(KEYS.values()), TENANTS)
    async with (
        open_gate(AccessSettings(api_keys=str(path)), AccessCounters()) as gate,
        ext_authz_server("127.0.0.1:0", servicer := ExtAuthzServicer(gate, rules), gate, None) as server,
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        yield Asked(servicer, gate, dict(zip(KEYS, secrets, strict=True)), channel)


def status(response):
    return response.denied_response.status.code if response.HasField("denied_response") else 200


def headers_of(options):
    return {option.header.key: option.header.value for option in options}


@pytest.mark.parametrize(
    ("method", "path", "requirement"),
    [
        ("POST", CHAT, Requirement(scope=Scope.INFERENCE, limited=True)),
        ("POST", f"{CHAT}?x=/health", Requirement(scope=Scope.INFERENCE, limited=True)),
        ("POST", "/v1/messages", Requirement(scope=Scope.INFERENCE, limited=True)),
        ("POST", "/v1/responses", Requirement(scope=Scope.INFERENCE, limited=True)),
        ("GET", "/v1/models/some/thing", Requirement(scope=Scope.INFERENCE)),
        ("GET", "/metrics", Requirement(scope=Scope.METRICS)),
        ("HEAD", "/metrics", Requirement(scope=Scope.METRICS)),
        ("GET", "/health", Requirement(public=True, scope=Scope.INFERENCE)),
        ("OPTIONS", CHAT, Requirement(public=True)),
        ("OPTIONS", "/nothing", Requirement(scope=Scope.INFERENCE)),
        ("POST", "/health", Requirement(scope=Scope.INFERENCE)),
        ("GET", "/nothing", Requirement(scope=Scope.INFERENCE)),
        ("", "", Requirement(scope=Scope.INFERENCE)),
        ("POST", GENERATE, Requirement(scope=Scope.INFERENCE, limited=True)),
        ("POST", "/baton.v1.InferenceService/ListModels", Requirement(scope=Scope.INFERENCE)),
        ("POST", "/grpc.health.v1.Health/Check", Requirement(public=True, scope=Scope.INFERENCE)),
        ("POST", "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", Requirement()),
        ("POST", "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", Requirement()),
        ("POST", "/x/grpc.health.v1.Health/Check", Requirement(scope=Scope.INFERENCE)),
    ],
)
def test_the_required_scope_is_the_routes(rules, method, path, requirement):
    assert rules.requirement_of(RequestHead(method, path, {})) == requirement
    assert rules.requirement_of(RequestHead(method, path, GRPC)) == requirement  # whatever it says of its body


async def test_a_good_key_passes_as_its_tenant(asked):
    response = await asked.check("POST", CHAT, "good", x_baton_tenant="other")
    assert (status(response), response.status.code) == (200, 0)
    key_id = asked.keys["good"].split("-")[1]
    assert headers_of(response.ok_response.headers) == {"x-baton-tenant": "acme", "x-baton-key-id": key_id}


async def test_public_routes_pass_without_an_identity(asked):
    response = await asked.check("GET", "/health")
    assert list(response.ok_response.headers_to_remove) == ["x-baton-tenant", "x-baton-key-id"]
    assert asked.servicer.answers == {"public": 1}


@pytest.mark.parametrize(
    ("key", "path", "expected"),
    [
        ("", CHAT, 401),
        ("", "/nothing", 401),
        ("wrong", CHAT, 401),
        ("bt-" + "x" * 60_000, CHAT, 401),
        ("good", "/metrics", 403),
        ("metrics", "/metrics", 200),
        ("metrics", "/v1/models", 403),
        ("admin", "/metrics", 200),
    ],
)
async def test_keys_and_scopes_decide(asked, key, path, expected):
    method = "POST" if path == CHAT else "GET"
    response = await asked.check(method, path, key, x_request_id="r-1")
    assert status(response) == expected
    if expected != 200:
        assert headers_of(response.denied_response.headers)["x-request-id"] == "r-1"
        assert json.loads(response.denied_response.body)["error"]["message"]


async def test_two_keys_are_none(asked):
    response = await asked.check("POST", CHAT, "good", x_api_key=asked.keys["admin"])
    assert status(response) == 401
    same = await asked.check("POST", CHAT, "good", x_api_key=asked.keys["good"])
    assert status(same) == 200
    joined = await asked.check("POST", CHAT, authorization=",".join(2 * [f"Bearer {asked.keys['good']}"]))
    assert status(joined) == 401


async def test_anthropics_clients_get_errors_in_their_format(asked):
    response = await asked.check("POST", "/v1/messages", x_request_id="r-2")
    body = json.loads(response.denied_response.body)
    assert (body["type"], body["error"]["type"], body["request_id"]) == ("error", "authentication_error", "r-2")
    assert headers_of(response.denied_response.headers)["request-id"] == "r-2"


async def test_asking_counts_nothing_and_a_tenant_at_its_limit_does_not_pass(asked):
    for _ in range(5):
        assert status(await asked.check("POST", CHAT, "limited")) == 200
    identity = asked.gate.identify(keys_in_headers({b"x-api-key": asked.keys["limited"].encode()}))
    await asked.gate.admit(identity, RequestCost())
    response = await asked.check("POST", CHAT, "limited")
    assert status(response) == 429
    headers = headers_of(response.denied_response.headers)
    assert headers["x-ratelimit-remaining-requests"] == "0"
    assert 1 <= int(headers["retry-after"]) <= 61
    assert status(await asked.check("GET", "/v1/models", "limited")) == 200
    over_grpc = await asked.check("POST", GENERATE, "limited", content_type="application/grpc")
    assert headers_of(over_grpc.denied_response.headers)["grpc-status"] == "8"
    assert over_grpc.denied_response.body.startswith("Rate limit reached")
    (family,) = ExtAuthzCollector(asked.servicer).collect()
    assert {sample.labels["answer"]: sample.value for sample in family.samples} == {"allowed": 6, "limited": 2}


async def test_bytes_that_are_no_request_are_an_error_and_no_answer(asked):
    send = asked.channel.unary_unary("/envoy.service.auth.v3.Authorization/Check")
    for data in (b"\xff\xff", b"\x0a\x7f"):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await send(data, timeout=20)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(grpc.aio.AioRpcError):
        await send(b"\x0a\xff", timeout=20)
    assert CheckResponse.FromString(await send(b"", timeout=20)).denied_response.status.code == 401


async def test_while_no_keys_were_read_there_is_no_answer(tmp_path, rules):
    settings = AccessSettings(api_keys="redis", redis_url="redis://127.0.0.1:1/0")
    async with (
        open_gate(settings, AccessCounters()) as gate,
        ext_authz_server("127.0.0.1:0", servicer := ExtAuthzServicer(gate, rules), gate, None) as server,
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        asked = Asked(servicer, gate, {}, channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asked.check("POST", CHAT, "bt-aaaaaaaaaa-" + "b" * 40)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert servicer.answers == {"failed": 1}
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20)
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.mark.parametrize("service", [ENVOY, OPERATOR, ROUTER, WORKER, GATEWAY])
async def test_over_tls_only_an_envoy_may_ask(tmp_path, rules, service):
    certificates = make_certs(tmp_path / "certs")
    path, _ = key_file(tmp_path, list(KEYS.values()), TENANTS)
    async with (
        open_gate(AccessSettings(api_keys=str(path)), AccessCounters()) as gate,
        ext_authz_server(
            "127.0.0.1:0", servicer := ExtAuthzServicer(gate, rules), gate, tls_of(certificates, GATEWAY)
        ) as server,
        dial_as(certificates, service, GATEWAY)(f"127.0.0.1:{server.port}") as channel,
    ):
        check = Asked(servicer, gate, {}, channel).check("GET", "/health")
        if service == ENVOY:
            assert status(await check) == 200
            return
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await check
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_a_port_in_use_is_reported(rules, asked):
    with pytest.raises(Unavailable, match="ext_authz_listen"):
        async with ext_authz_server("127.0.0.1:0x", asked.servicer, asked.gate, None):
            pass


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"ext_authz_listen": "nowhere"}, "host:port"),
        ({"ext_authz_listen": "127.0.0.1:8002"}, "api_keys"),
        ({"ext_authz_listen": "127.0.0.1:8000", "api_keys": "keys.toml"}, "another port"),
        ({"ext_authz_listen": "127.0.0.1:8001", "api_keys": "keys.toml"}, "another port"),
    ],
)
def test_a_wrong_address_is_reported_at_the_start(settings, told):
    with pytest.raises(InvalidRequest, match=told) as caught:
        GatewayConfig(**settings).validate()
    assert caught.value.field == "ext_authz_listen"


def test_it_is_off_by_default():
    assert GatewayConfig().ext_authz_listen == ""
