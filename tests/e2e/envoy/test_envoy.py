"""A real Envoy with the shipped configuration in front of real services: which clients pass, and streaming."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from contextlib import ExitStack

import grpc
import httpx
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from support.network import envoy
from support.network.envoy_rig import HOSTS, chat, grpc_channel, http_client, make_access, start_fleet
from support.network.tls_rig import der_of, dial_as, make_certs, replace_files, shown_by
from support.processes.stack import MODEL_NAME, metric, run_async, wait_until

from baton.rpc.identity.identity import OPERATOR, WORKER
from baton.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc, types_pb2

ORIGIN = "https://app.example.com"
WRONG_KEYS = {
    "unknown": "bt-aaaaaaaaaa-" + "b" * 40,
    "truncated": "bt-aaaaaaaaaa-bbb",
    "enormous": "bt-aaaaaaaaaa-" + "b" * 9000,
}


@pytest.fixture(scope="module")
def access(tmp_path_factory):
    return make_access(tmp_path_factory.mktemp("access"))


@pytest.fixture(scope="module")
def fleet(tmp_path_factory, access):
    with ExitStack() as cleanup:
        yield start_fleet(tmp_path_factory.mktemp("stack"), cleanup, access, "--cors-origins", ORIGIN)


@pytest.fixture(scope="module")
def front(tmp_path_factory, fleet):
    with envoy.running(tmp_path_factory.mktemp("envoy"), fleet.addresses) as front:
        wait_until(front.all_healthy, "Envoy finds every upstream healthy", 30)
        yield front


@pytest.fixture(scope="module")
def client(front, access):
    with http_client(front, access, http2=True) as client:
        yield client


@pytest.fixture
async def stub(front, access):
    async with grpc_channel(front, access) as channel:
        yield inference_pb2_grpc.InferenceServiceStub(channel)


def generate(max_tokens=4):
    return inference_pb2.GenerateRequest(
        request_id=f"through-envoy-{time.monotonic_ns()}",
        model=MODEL_NAME,
        text="Once upon a time",
        stop=types_pb2.StopConditions(max_tokens=max_tokens, ignore_eos=True),
    )


def metadata(access, name):
    return tuple(access.headers(name).items())


async def worker_stats(fleet):
    async with dial_as(fleet.access.certificates, OPERATOR, WORKER)(fleet.stack.workers[0].plan.address) as channel:
        stub = control_pb2_grpc.ControlServiceStub(channel)
        return await stub.GetStats(control_pb2.GetStatsRequest(), timeout=10)


async def test_the_shipped_configuration_is_valid_as_it_is(tmp_path, access):
    addresses = envoy.Addresses(
        1, 2, dict.fromkeys(("gateway_rest", "gateway_grpc", "ext_authz"), 3), access.certificates
    )
    ended = envoy.Envoy(tmp_path, envoy.shipped(access.certificates), addresses).validate()
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("http2", [False, True])
def test_a_good_key_passes(front, access, http2):
    with http_client(front, access, http2) as client:
        answer = client.post("/v1/chat/completions", json=chat(), headers=access.headers("good"))
    assert answer.status_code == 200, answer.text
    assert answer.http_version == ("HTTP/2" if http2 else "HTTP/1.1")
    assert answer.json()["usage"]["completion_tokens"] == 4
    assert answer.headers["server"] == "baton"


def test_a_key_of_anthropics_clients_passes(client, access):
    body = {"model": MODEL_NAME, "max_tokens": 4, "messages": chat()["messages"]}
    answer = client.post("/v1/messages", json=body, headers={"x-api-key": access.keys["good"]})
    assert answer.status_code == 200, answer.text


def test_public_routes_need_no_key(client):
    assert client.get("/ready").status_code == 200
    assert client.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("", "didn't provide"),
        *((key, "Incorrect") for key in WRONG_KEYS.values()),
        ("expired", "expired"),
        ("revoked", "revoked"),
    ],
    ids=["none", *WRONG_KEYS, "expired", "revoked"],
)
def test_an_invalid_key_is_an_error_in_openais_format(client, access, key, says):
    headers = {"authorization": f"Bearer {access.keys.get(key, key)}"} if key else {}
    answer = client.post("/v1/chat/completions", json=chat(), headers={**headers, "x-request-id": "denied-1"})
    assert answer.status_code == 401
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.headers["x-request-id"] == "denied-1"
    error = answer.json()["error"]
    assert says in error["message"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")


def test_an_invalid_key_is_an_error_in_anthropics_format(client):
    answer = client.post("/v1/messages", json={}, headers={"x-api-key": "sk-ant-whatever", "x-request-id": "denied-2"})
    assert answer.status_code == 401
    assert answer.headers["request-id"] == "denied-2"
    assert answer.json()["error"]["type"] == "authentication_error"


@pytest.mark.parametrize("name", ["", "expired", "revoked"])
async def test_a_grpc_client_without_a_good_key_gets_a_status(stub, access, name):
    call = stub.Generate(generate(), metadata=metadata(access, name) if name else ())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert (name or "API key") in caught.value.details()


def test_a_key_that_is_revoked_ends_being_good(client, access):
    headers = access.headers("leaving")
    assert client.get("/v1/models", headers=headers).status_code == 200
    access.revoke("leaving")
    wait_until(lambda: client.get("/v1/models", headers=headers).status_code == 401, "the key is refused", 20)


def test_operator_routes_require_their_scope(client, access):
    refused = client.get("/metrics", headers=access.headers("good"))
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "missing_scope")
    assert "baton_gateway" in client.get("/metrics", headers=access.headers("metrics")).text
    assert client.post("/v1/chat/completions", json=chat(), headers=access.headers("metrics")).status_code == 403


def test_a_limit_is_reported_before_the_body_and_counts_once(client, front, access):
    headers = access.headers("limited")
    for _ in range(2):
        assert client.post("/v1/chat/completions", json=chat(), headers=headers).status_code == 200
    refused = client.post("/v1/chat/completions", json=chat(), headers={**headers, "x-request-id": "limited-3"})
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert 1 <= int(refused.headers["retry-after"]) <= 61
    assert refused.headers["x-ratelimit-limit-requests"] == "2"
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert front.logged("limited-3")["details"] == "ext_authz_denied"
    # What counts nothing is not refused either.
    assert client.get("/v1/models", headers=headers).status_code == 200
    text = client.get("/metrics", headers=access.headers("metrics")).text
    assert metric(text, "baton_gateway_ext_authz_checks_total", answer="limited") >= 1


def test_pages_of_a_configured_origin_can_read_envoys_refusals(client):
    preflight = {"origin": ORIGIN, "access-control-request-method": "POST"}
    asked = client.options("/v1/chat/completions", headers=preflight)
    assert asked.status_code == 204
    assert "POST" in asked.headers["access-control-allow-methods"].split(", ")
    for origin, told in ((ORIGIN, ORIGIN), ("https://evil.example", None)):
        answer = client.post("/v1/chat/completions", json=chat(), headers={"origin": origin})
        assert answer.status_code == 401
        assert answer.headers.get("access-control-allow-origin") == told


async def test_a_grpc_client_over_its_limit_gets_a_retry_delay(stub, access):
    for _ in range(2):
        assert [one async for one in stub.Generate(generate(), metadata=metadata(access, "limited_grpc"))]
    call = stub.Generate(generate(), metadata=metadata(access, "limited_grpc"))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    status = rpc_status.from_call(caught.value)
    assert status is not None, caught.value
    retry = error_details_pb2.RetryInfo()
    assert any(packed.Unpack(retry) for packed in status.details)
    assert 0 < retry.retry_delay.ToSeconds() <= 61


async def test_tokens_arrive_while_the_rest_is_made(front, fleet, access):
    """And a client that leaves stops its generation on the worker."""
    with http_client(front, access) as client:
        body = chat(stream=True, max_tokens=1900, ignore_eos=True)
        with client.stream("POST", "/v1/chat/completions", json=body, headers=access.headers("good")) as answer:
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith("text/event-stream")
            chunks = (line for line in answer.iter_lines() if line.startswith("data: "))
            assert [json.loads(next(chunks)[6:])["object"] for _ in range(3)] == ["chat.completion.chunk"] * 3
            assert (await worker_stats(fleet)).num_held_blocks > 0
    await none_held(fleet)


async def none_held(fleet):
    deadline = time.monotonic() + 20
    while (await worker_stats(fleet)).num_held_blocks:
        assert time.monotonic() < deadline, "the worker still runs what nobody waits for"


async def test_a_grpc_stream_passes_and_ends_with_its_client(stub, fleet, access):
    call = stub.Generate(generate(max_tokens=1900), metadata=metadata(access, "good"))
    for _ in range(3):
        assert await call.read()
    assert (await worker_stats(fleet)).num_held_blocks > 0
    call.cancel()
    await none_held(fleet)


def test_grpc_web_passes(client, access):
    message = generate().SerializeToString()
    answer = client.post(
        "/baton.v1.InferenceService/Generate",
        content=b"\0" + len(message).to_bytes(4, "big") + message,
        headers={**access.headers("good"), "content-type": "application/grpc-web+proto", "x-grpc-web": "1"},
    )
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("application/grpc-web")
    assert b"grpc-status:0" in answer.content.replace(b" ", b"")


def test_the_access_log_has_the_tenant_and_no_key(client, front, access):
    headers = {**access.headers("good"), "x-request-id": "logged-1", "x-baton-tenant": "somebody-else"}
    assert client.get("/v1/models?api-version=secret-in-a-query", headers=headers).status_code == 200
    line = front.logged("logged-1")
    assert (line["tenant"], line["key_id"]) == ("acme", access.keys["good"].split("-")[1])
    assert (line["path"], line["status"], line["protocol"]) == ("/v1/models", 200, "HTTP/2")
    text = (front.folder / "access.log").read_text()
    assert "secret-in-a-query" not in text
    assert not any(key in text for key in access.keys.values())


async def test_new_certificates_are_presented_and_streams_continue(front, fleet, access, stub, tmp_path):
    call = stub.Generate(generate(max_tokens=1900), metadata=metadata(access, "good"))
    assert await call.read()
    before = shown_by(front.address, access.certificates)
    new = make_certs(tmp_path / "new", access.certificates, hosts=HOSTS)
    replace_files(access.certificates, new, "envoy", "edge")
    wait_until(lambda: shown_by(front.address, access.certificates) == der_of(new, "edge") != before, "it is shown", 20)
    assert await call.read()
    call.cancel()


def test_a_body_over_the_limit_is_refused(front, access):
    # Over HTTP/1.1: this client waits for ever where an HTTP/2 answer comes before its body is out.
    with http_client(front, access) as client:
        answer = client.post("/v1/chat/completions", content=b"x" * (17 << 20), headers=access.headers("good"))
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")


def test_an_envoy_that_dies_under_load_is_replaced_and_leaves_nothing_running(fleet, front, access):
    stop = threading.Event()
    statuses = [Counter() for _ in range(6)]
    threads = [threading.Thread(target=keep_asking, args=(front, access, stop, one)) for one in statuses]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: all(one[200] for one in statuses), "every client was answered", 30)
        front.stop(by_force=True)
        wait_until(lambda: all(one["broken"] for one in statuses), "every client noticed", 30)
        before = [one[200] for one in statuses]
        front.start()
        wait_until(
            lambda: all(one[200] > count for one, count in zip(statuses, before, strict=True)), "all are back", 30
        )
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert set().union(*statuses) == {200, "broken"}
    run_async(none_held(fleet))


def keep_asking(front, access, stop, statuses):
    """Streams one answer after another. Each is complete or ends with an error."""
    body = chat(stream=True, max_tokens=16, ignore_eos=True)
    while not stop.is_set():
        try:
            with http_client(front, access) as client:
                answer = client.post("/v1/chat/completions", json=body, headers=access.headers("good"))
            assert answer.status_code != 200 or answer.text.endswith("data: [DONE]\n\n")
            statuses[answer.status_code] += 1
        except httpx.TransportError:
            statuses["broken"] += 1
            stop.wait(0.05)


def test_during_a_gateways_restart_clients_fail_fast_and_are_then_served(fleet, front, access):
    gateway = fleet.stack["gateway"]
    assert gateway.stop() == 0
    with http_client(front, access) as client:
        refused = client.post("/v1/chat/completions", json=chat(), headers=access.headers("good"), timeout=20)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "service_unavailable"
        gateway.start()

        def answered():
            return client.post("/v1/chat/completions", json=chat(), headers=access.headers("good")).status_code == 200

        wait_until(answered, "the new gateway is found", 30)
