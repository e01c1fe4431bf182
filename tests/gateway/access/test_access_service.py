"""Keys, tenants and limits at the whole gateway: REST in OpenAI's and Anthropic's forms, gRPC in its own."""

import asyncio
import contextlib
import json
import time

import anthropic
import grpc
import openai
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status
from prometheus_client.parser import text_string_to_metric_families
from support.gateway.access_rig import key_file
from support.gateway.responses_rig import HI
from support.gateway.rest_harness import RawClient
from support.gateway.scripted_gateway import running
from support.gateway.scripted_services import until

from baton.gateway.config import GatewayConfig
from baton.rpc.errors import InvalidRequest, NoCapacity
from baton.services import settings
from baton.v1 import conversation_pb2, response_pb2
from baton.v1 import inference_pb2 as pb
from baton.v1.inference_pb2_grpc import InferenceServiceStub

NAME = "storyteller-7m"
MESSAGES = [{"role": "user", "content": "Hi"}]
PUBLIC = {"/health", "/ping", "/ready"}
TENANTS = {
    "acme": {"weight": 3.0, "priority": 5},
    "rival": {"models": ["another"]},
    "twin": {"salt": "shared"},
    "other": {"salt": "shared"},
    "small": {"requests_per_minute": 2, "output_tokens_per_minute": 100, "input_tokens_per_minute": 10_000},
    "single": {"concurrent_requests": 1, "output_tokens_per_minute": 1000},
    "broke": {"tokens_per_month": 1},
}


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """A file of keys, and a key by tenant and kind."""
    fields = {
        **{name: {"tenant": name} for name in TENANTS},
        "admin": {"scopes": ["admin"]},
        "metrics": {"scopes": ["metrics"]},
        "expired": {"expires": "2020-01-01T00:00:00Z"},
        "revoked": {"revoked": True},
    }
    path, made = key_file(tmp_path_factory.mktemp("keys"), list(fields.values()), TENANTS)
    return path, dict(zip(fields, made, strict=True))


@pytest.fixture
async def gateway(keys):
    async with running(lambda submit: [10, 11, 12, 4], api_keys=str(keys[0])) as gateway:
        gateway.keys = keys[1]
        yield gateway


@contextlib.asynccontextmanager
async def stub_of(gateway, kind=InferenceServiceStub):
    async with grpc.aio.insecure_channel(gateway.config.grpc_listen) as channel:
        yield kind(channel)


async def ask(gateway, method, path, body=None, key=None, **headers):
    given = {"authorization": f"Bearer {key}"} if key else {}
    async with RawClient.connect(gateway.port) as client:
        return await client.request(method, path, body, {**given, **headers})


async def chat(gateway, key, **fields):
    return await ask(gateway, "POST", "/v1/chat/completions", {"messages": MESSAGES, **fields}, key)


def openai_of(gateway, key):
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{gateway.port}/v1", api_key=key, max_retries=0)


async def test_every_route_but_health_needs_a_key_in_its_own_protocol(gateway):
    document = (await ask(gateway, "GET", "/openapi.json", key=gateway.keys["acme"])).json
    assert (await ask(gateway, "GET", "/")).status == 200
    seen = 0
    for path, methods in document["paths"].items():
        for method in methods:
            body = {} if method == "post" else None
            place = path.replace("{model}", NAME).replace("{response_id}", "resp_1")
            place = place.replace("{completion_id}", "chatcmpl-1").replace("{conversation_id}", "conv_1")
            place = place.replace("{file_id}", "file-1").replace("{batch_id}", "batch_1")
            answer = await ask(gateway, method.upper(), place, body)
            if path in PUBLIC:
                assert answer.status == 200
                assert methods[method]["security"] == []
                continue
            seen += 1
            assert answer.status == 401, path
            assert answer.headers["www-authenticate"] == "Bearer"
            if path.startswith("/v1/messages"):
                assert answer.json["type"] == "error"
                assert answer.error["type"] == "authentication_error"
            else:
                assert answer.error["type"] == "invalid_request_error"
                assert answer.error["code"] == "invalid_api_key"
            assert {"401", "403"} <= set(methods[method]["responses"])
    assert seen > 15


async def test_every_grpc_method_but_health_needs_a_key(gateway):
    async with stub_of(gateway) as stub, stub_of(gateway, health_pb2_grpc.HealthStub) as health:
        assert (await health.Check(health_pb2.HealthCheckRequest())).status
        calls = [
            lambda metadata: collect(stub.Generate(pb.GenerateRequest(text="Hi"), metadata=metadata)),
            lambda metadata: stub.ListModels(pb.ListModelsRequest(), metadata=metadata),
            lambda metadata: stub.Tokenize(pb.TokenizeRequest(text="Hi"), metadata=metadata),
            lambda metadata: stub.Detokenize(pb.DetokenizeRequest(token_ids=[10]), metadata=metadata),
            lambda metadata: collect(stub.CreateResponse(pb.CreateResponseRequest(input=[HI]), metadata=metadata)),
        ]
        good = gateway.keys["acme"]
        bad = [(), (("authorization", "Bearer x"),), (("authorization", good),)]
        bad += [(("authorization", f"Bearer {good}"), ("authorization", "Bearer x"))]
        for call in calls:
            for metadata in bad:
                assert await code_of(call(metadata)) is grpc.StatusCode.UNAUTHENTICATED
            metrics = (("x-api-key", gateway.keys["metrics"]),)
            assert await code_of(call(metrics)) is grpc.StatusCode.PERMISSION_DENIED
            await call((("authorization", f"Bearer {good}"),))
            await call((("x-api-key", good),))
        for name in ("GetResponse", "WatchResponse", "CancelResponse", "DeleteResponse", "ListResponseInput"):
            request = getattr(response_pb2, f"{name}Request")(response_id="none")
            for metadata, code in (*((one, "UNAUTHENTICATED") for one in bad), ((("x-api-key", good),), "NOT_FOUND")):
                answer = getattr(stub, name)(request, metadata=metadata)
                answer = collect(answer) if name == "WatchResponse" else answer
                assert (await code_of(answer)).name == code, name
        for name in ("GetConversation", "UpdateConversation", "DeleteConversation", "ListConversationItems"):
            request = getattr(conversation_pb2, f"{name}Request")(conversation_id="none")
            for metadata, code in (*((one, "UNAUTHENTICATED") for one in bad), ((("x-api-key", good),), "NOT_FOUND")):
                assert (await code_of(getattr(stub, name)(request, metadata=metadata))).name == code, name
    async with stub_of(gateway, reflection_pb2_grpc.ServerReflectionStub) as stub:
        listing = reflection_pb2.ServerReflectionRequest(list_services="")
        code = await code_of(collect(stub.ServerReflectionInfo(iter([listing]))))
        assert code is grpc.StatusCode.UNAUTHENTICATED
        metadata = (("authorization", f"Bearer {good}"),)
        assert await collect(stub.ServerReflectionInfo(iter([listing]), metadata=metadata))


async def test_bad_keys_get_their_status_quickly_a_counter_and_no_line_in_a_log(gateway, caplog):
    good = gateway.keys["acme"]
    cases = [
        ("missing", {}),
        ("incorrect", {"authorization": f"Bearer {good[:-1]}{'a' if good[-1] != 'a' else 'b'}"}),
        ("malformed", {"authorization": f"Bearer {good[:-5]}"}),
        ("malformed", {"authorization": "Basic dXNlcjpwYXNz"}),
        ("malformed", {"x-api-key": "clé-secrète"}),
        ("malformed", {"x-api-key": "k" * 20_000}),
        ("malformed", {"authorization": f"Bearer {good}\r\nauthorization: Bearer {good}"}),
        ("ambiguous", {"authorization": f"Bearer {good}", "x-api-key": gateway.keys["admin"]}),
        ("expired", {"authorization": f"Bearer {gateway.keys['expired']}"}),
        ("revoked", {"x-api-key": gateway.keys["revoked"]}),
    ]
    for _, headers in cases:
        answer = await ask(gateway, "POST", "/v1/chat/completions", {"messages": MESSAGES}, **headers)
        assert answer.status in (400, 401), headers
        assert not any(key[14:] in answer.body.decode() for key in gateway.keys.values())
    began = time.monotonic()
    huge = await ask(gateway, "GET", "/v1/models", None, authorization="Bearer " + "x" * (1 << 20))
    assert huge.status == 431
    assert time.monotonic() - began < 5
    counted = await metric(gateway, "baton_gateway_access_refused", "reason")
    reasons = [reason for reason, _ in cases]
    assert {reason: counted.get(reason, 0) for reason in set(reasons)}.items() <= counted.items()
    assert sum(counted.values()) >= len(cases) - 1  # HTTP may refuse two headers before anybody asks for keys
    assert not any(key[14:] in caplog.text for key in gateway.keys.values())
    assert not gateway.worker.submits


async def test_scopes_part_inference_metrics_and_admin(gateway):
    keys = gateway.keys
    for path, allowed in (
        ("/metrics", ("metrics", "admin")),
        ("/v1/models", ("acme", "admin")),
        ("/load", ("metrics",)),
    ):
        for name in ("acme", "metrics", "admin"):
            answer = await ask(gateway, "GET", path, key=keys[name])
            assert answer.status == (200 if name in allowed or name == "admin" else 403)
            if answer.status == 403:
                assert answer.error["code"] == "missing_scope"
    answer = await ask(gateway, "POST", "/v1/messages", {}, keys["metrics"])
    assert (answer.status, answer.error["type"]) == (403, "permission_error")


async def test_official_clients_know_these_errors(gateway):
    async with openai_of(gateway, "bt-wrong") as client:
        with pytest.raises(openai.AuthenticationError) as refused:
            await client.chat.completions.create(model=NAME, messages=MESSAGES)
        assert refused.value.code == "invalid_api_key"
    url = f"http://127.0.0.1:{gateway.port}"
    async with anthropic.AsyncAnthropic(base_url=url, api_key=gateway.keys["small"], max_retries=0) as client:
        raw = await client.messages.with_raw_response.create(model=NAME, max_tokens=5, messages=MESSAGES)
        assert raw.headers["anthropic-ratelimit-requests-remaining"] == "1"
        assert raw.headers["anthropic-ratelimit-output-tokens-limit"] == "100"
        await client.messages.create(model=NAME, max_tokens=5, messages=MESSAGES)
        with pytest.raises(anthropic.RateLimitError) as limited:
            await client.messages.create(model=NAME, max_tokens=5, messages=MESSAGES)
        assert limited.value.body["error"]["type"] == "rate_limit_error"
        assert int(limited.value.response.headers["retry-after"]) >= 1
    async with anthropic.AsyncAnthropic(base_url=url, api_key="bt-wrong", max_retries=0) as client:
        with pytest.raises(anthropic.AuthenticationError):
            await client.messages.create(model=NAME, max_tokens=5, messages=MESSAGES)


async def test_limit_headers_are_openais(gateway):
    async with openai_of(gateway, gateway.keys["small"]) as client:
        raw = await client.chat.completions.with_raw_response.create(model=NAME, messages=MESSAGES, max_tokens=90)
        assert raw.headers["x-ratelimit-limit-requests"] == "2"
        assert raw.headers["x-ratelimit-remaining-requests"] == "1"
        assert raw.headers["x-ratelimit-limit-tokens"] == "100"
        assert raw.headers["x-ratelimit-remaining-tokens"] == "10"
        assert raw.headers["x-ratelimit-reset-tokens"].startswith(("1m0", "59."))
        with pytest.raises(openai.RateLimitError) as large:
            await client.chat.completions.create(model=NAME, messages=MESSAGES, max_tokens=101)
        assert "output tokens per min (TPM): Limit 100, Requested 101" in large.value.message
        assert (large.value.type, large.value.code) == ("tokens", "rate_limit_exceeded")
        assert large.value.response.headers["x-should-retry"] == "false"
        # The first one gave back what it did not use.
        await client.completions.create(model=NAME, prompt=["Hi", "Ho"], max_tokens=45)
        with pytest.raises(openai.RateLimitError) as limited:
            await client.responses.create(model=NAME, input="Hi", max_output_tokens=5)
        assert "requests per min (RPM): Limit 2, Used 2, Requested 1. Please try again in" in limited.value.message
        assert limited.value.type == "requests"
        assert 1 <= int(limited.value.response.headers["retry-after"]) <= 61
        assert 1 <= int(limited.value.response.headers["retry-after-ms"]) <= 60_250
    broke = await chat(gateway, gateway.keys["broke"], max_tokens=5)
    assert (broke.status, broke.error["code"]) == (429, "insufficient_quota")
    assert (await metric(gateway, "baton_gateway_limited", "limit"))["budget"] == 1
    assert (await metric(gateway, "baton_gateway_rejected", "reason"))["insufficient_quota"] == 1


async def test_limits_over_grpc_are_resource_exhausted_with_a_delay(gateway):
    metadata = (("authorization", f"Bearer {gateway.keys['small']}"),)
    async with stub_of(gateway) as stub:
        for _ in range(2):
            call = stub.Generate(generate(5), metadata=metadata)
            await collect(call)
        assert dict(await call.initial_metadata())["x-ratelimit-remaining-requests"] == "0"
        with pytest.raises(grpc.aio.AioRpcError) as limited:
            await collect(stub.Generate(generate(5), metadata=metadata))
    assert limited.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    info = error_details_pb2.RetryInfo()
    assert any(detail.Unpack(info) for detail in rpc_status.from_call(limited.value).details)
    assert 0 < info.retry_delay.ToMilliseconds() <= 60_250


async def test_streams_that_end_early_or_fail_give_back(gateway):
    key = gateway.keys["single"]
    gateway.worker.silent = True
    for round_trip in range(3):
        async with RawClient.connect(gateway.port) as client:
            body = {"messages": MESSAGES, "max_tokens": 900, "stream": True}
            headers = {"authorization": f"Bearer {key}"}
            leaving = asyncio.create_task(client.request("POST", "/v1/chat/completions", body, headers))
            await until(lambda number=round_trip: len(gateway.worker.submits) > number or gateway.worker.num_streams)
            await asyncio.sleep(0.05)
            busy = await chat(gateway, key, max_tokens=5)
            assert (busy.status, "concurrent requests: Limit 1" in busy.error["message"]) == (429, True)
            leaving.cancel()
            await asyncio.wait([leaving])
        await until_free(gateway, key)
    gateway.worker.silent = False
    gateway.worker.refusal = NoCapacity("full")
    assert (await chat(gateway, key, max_tokens=900)).status == 429
    gateway.worker.refusal = None
    assert (await chat(gateway, key, max_tokens=900)).status == 200


async def test_a_tenants_weight_priority_and_salt_go_with_its_requests(gateway):
    prompt = {"prompt": list(range(10, 60)), "max_tokens": 5}
    names = ["acme", "twin", "other", "acme"]
    for name in names:
        answer = await ask(gateway, "POST", "/v1/completions", {**prompt, "priority": -9}, gateway.keys[name])
        assert answer.status == 200
    first, twin, other, again = gateway.worker.submits
    assert (first.tenant, first.priority) == ("acme", 5)
    assert (twin.tenant, twin.priority) == ("twin", 0)
    assert first.cache_namespace == again.cache_namespace != twin.cache_namespace == other.cache_namespace
    assert [placed.tenant_weight for placed in gateway.router.places][:2] == [3.0, 1.0]


async def test_a_model_of_others_is_as_if_it_were_not_there(gateway):
    key = gateway.keys["rival"]
    assert (await ask(gateway, "GET", "/v1/models", key=key)).json["data"] == []
    for method, path, body in (
        ("GET", f"/v1/models/{NAME}", None),
        ("POST", "/v1/chat/completions", {"messages": MESSAGES, "model": NAME}),
        ("POST", "/v1/completions", {"prompt": "Hi", "model": NAME}),
        ("POST", "/v1/responses", {"input": "Hi", "model": NAME}),
        ("POST", "/v1/messages", {"messages": MESSAGES, "model": NAME, "max_tokens": 5}),
        ("POST", "/inference/v1/generate", {"token_ids": [10], "model": NAME}),
        ("POST", "/tokenize", {"prompt": "Hi", "model": NAME}),
    ):
        answer = await ask(gateway, method, path, body, key)
        assert answer.status == 404, path
        assert f"The model `{NAME}` does not exist." in answer.error["message"]
    async with stub_of(gateway) as stub:
        metadata = (("x-api-key", key),)
        assert not (await stub.ListModels(pb.ListModelsRequest(), metadata=metadata)).models
        assert await code_of(collect(stub.Generate(generate(5), metadata=metadata))) is grpc.StatusCode.NOT_FOUND


async def test_stored_responses_are_their_tenants(gateway):
    made = await ask(gateway, "POST", "/v1/responses", {"input": "Hi", "max_output_tokens": 5}, gateway.keys["acme"])
    path = f"/v1/responses/{made.json['id']}"
    for key, status in ((gateway.keys["twin"], 404), (gateway.keys["acme"], 200)):
        assert (await ask(gateway, "GET", path, key=key)).status == status
        assert (await ask(gateway, "GET", f"{path}/input_items", key=key)).status == status
        assert (await ask(gateway, "POST", f"{path}/cancel", {}, key)).status == (404 if status == 404 else 400)
        body = {"input": "Go on", "previous_response_id": made.json["id"], "max_output_tokens": 5}
        assert (await ask(gateway, "POST", "/v1/responses", body, key)).status == status
        assert (await ask(gateway, "DELETE", path, key=key)).status == status


async def test_limits_in_redis_hold_over_two_gateways(keys, redis_server):
    key = keys[1]["small"]
    options = {"api_keys": str(keys[0]), "redis_url": redis_server.url, "limit_timeout_ms": 5000.0}
    async with running(lambda submit: [10, 4], **options) as one, running(lambda submit: [10, 4], **options) as other:
        assert (await chat(one, key, max_tokens=5)).status == 200
        assert (await chat(other, key, max_tokens=5)).headers["x-ratelimit-remaining-requests"] == "0"
        for gateway in (one, other):
            gateway.keys = keys[1]
            assert (await chat(gateway, key, max_tokens=5)).status == 429
            assert (await metric(gateway, "baton_gateway_limits_redis_up"))[None] == 1


@pytest.mark.parametrize("flag", ["--rest-listen", "--grpc-listen"])
@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "10.0.0.7:0", "gateway.example:0"])
def test_without_keys_a_gateway_listens_on_loopback_only(flag, address):
    with pytest.raises(settings.SettingsError, match=r"baton keys create.*127\.0\.0\.1.*--allow-anonymous"):
        settings.load("gateway", (GatewayConfig,), [flag, address], {})
    for more in (["--allow-anonymous"], ["--api-keys", "keys.toml"]):
        settings.load("gateway", (GatewayConfig,), [flag, address, *more], {})


@pytest.mark.parametrize("address", ["127.0.0.1:0", "127.9.9.9:0", "[::1]:0", "localhost:0"])
def test_loopback_needs_no_keys(address):
    GatewayConfig(rest_listen=address).validate()


def test_keys_in_redis_need_a_redis():
    with pytest.raises(InvalidRequest, match="redis_url"):
        GatewayConfig(api_keys="redis").validate()


def generate(max_tokens):
    request = pb.GenerateRequest(text="Hi")
    request.stop.max_tokens = max_tokens
    return request


async def collect(call):
    return [response async for response in call]


async def code_of(call):
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def until_free(gateway, key):
    """Waits until the abandoned request holds no reservation."""
    gateway.worker.silent = False
    for _ in range(200):
        answer = await chat(gateway, key, max_tokens=900)
        if answer.status == 200:
            gateway.worker.silent = True
            return
        await asyncio.sleep(0.02)
    raise AssertionError(json.dumps(answer.json))


async def metric(gateway, name, label=None):
    text = (await ask(gateway, "GET", "/metrics", key=gateway.keys["metrics"])).body.decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    samples = families[name].samples if name in families else []
    return {sample.labels.get(label): sample.value for sample in samples if not sample.name.endswith("_created")}
