"""Hostile requests to a real Envoy: none passes with another identity, as another path, or without authorization.

The gateway that Envoy asks is real; what stands behind is a recorder, to see what came through.
"""

from __future__ import annotations

import dataclasses
import socket
import ssl
import time
from contextlib import ExitStack, closing

import grpc
import pytest
from support.network import envoy
from support.network.envoy_rig import grpc_channel, http_client, make_access, start_gateway, trusting
from support.network.http_recorder import recording
from support.processes import ports
from support.processes.stack import wait_until

from baton.v1 import inference_pb2, inference_pb2_grpc

CHAT = "/v1/chat/completions"
NO_KEY = "bt-aaaaaaaaaa-" + "b" * 40
QUICKLY = 5.0  # seconds; what waits for a timeout of the shipped configuration takes longer


@pytest.fixture(scope="module")
def access(tmp_path_factory):
    return make_access(tmp_path_factory.mktemp("access"))


@pytest.fixture(scope="module")
def gateway(tmp_path_factory, access):
    with ExitStack() as cleanup:
        addresses, _ = start_gateway(tmp_path_factory.mktemp("gateway"), cleanup, access)
        yield addresses


@pytest.fixture(scope="module")
def recorder():
    with recording() as recorder:
        yield recorder


@pytest.fixture(scope="module")
def front(tmp_path_factory, gateway, recorder):
    upstreams = {**gateway.upstreams, "gateway_rest": recorder.port}
    addresses = dataclasses.replace(gateway, upstreams=upstreams, plain=frozenset(("gateway_rest",)))
    with envoy.running(tmp_path_factory.mktemp("envoy"), addresses) as front:
        wait_until(lambda: front.stats()["cluster.ext_authz.membership_healthy"], "Envoy can ask", 30)
        yield front


@pytest.fixture
def sent(front, access, recorder):
    """Sends bytes as they are; returns the status, 0 where the connection just ends."""

    def send(*lines: str | bytes, body: bytes = b"") -> int:
        forget(recorder)
        head = b"\r\n".join(line if isinstance(line, bytes) else line.encode() for line in lines)
        return status_of(front, access, head + b"\r\n\r\n" + body)

    return send


def forget(recorder):
    """Drops earlier requests and health checks."""
    recorder.heads.clear()


def seen(recorder):
    return [path for path in recorder.paths() if path != "/ready"]


def status_of(front, access, data):
    context = trusting(access)
    context.set_alpn_protocols(["http/1.1"])
    host, _, port = front.address.rpartition(":")
    with closing(
        context.wrap_socket(socket.create_connection((host, int(port)), timeout=20), server_hostname=host)
    ) as one:
        try:
            one.sendall(data)
            answer = one.recv(65536)
        except (ConnectionError, ssl.SSLError):
            return 0
        return int(answer.split(b" ")[1]) if answer else 0


def request(path, *headers, key="", method="GET"):
    """The lines of a request's head."""
    authorization = (f"authorization: Bearer {key}",) if key else ()
    return (f"{method} {path} HTTP/1.1", "host: localhost", *authorization, *headers)


def test_clients_cannot_set_identity_headers(sent, access, recorder):
    fakes = ("x-baton-tenant: other", "X-Baton-Tenant: other", "x-baton-key-id: zzzzzzzzzz", "x-baton-whatever: 1")
    assert sent(*request("/v1/models", *fakes, "x-tenant: other", key=access.keys["good"])) == 200
    assert recorder.values("x-baton-tenant") == ["acme"]
    assert recorder.values("x-baton-key-id") == [access.keys["good"].split("-")[1]]
    assert "x-baton-whatever" not in recorder.names()


def test_public_routes_pass_without_an_identity(sent, recorder):
    assert sent(*request("/health", "x-baton-tenant: other", "connection: x-baton-key-id", "x-baton-key-id: 1")) == 200
    assert seen(recorder) == ["/health"]
    assert not [name for name in recorder.names() if name.startswith("x-baton")]


@pytest.mark.parametrize("forwarded", [(), ("x-forwarded-for: 10.1.2.3",), ("x-forwarded-for: 127.0.0.1",)])
def test_headers_that_steer_envoy_do_nothing_from_outside(sent, access, recorder, forwarded):
    """Nor do they from this machine."""
    steering = (
        "x-envoy-upstream-rq-timeout-ms: 1", "x-envoy-max-retries: 9", "x-envoy-retry-on: 5xx",
        "x-envoy-original-path: /metrics", "x-envoy-force-trace: 1", "x-envoy-expected-rq-timeout-ms: 1",
        "x-envoy-internal: true",
    )  # fmt: skip
    assert sent(*request("/v1/models", *steering, *forwarded, key=access.keys["good"])) == 200
    assert not {name for name in recorder.names() if name.startswith("x-envoy-")} - {"x-envoy-external-address"}
    assert recorder.values("x-forwarded-for")[0] not in ("10.1.2.3", "127.0.0.1") or not forwarded


@pytest.mark.parametrize("name", ["x_baton_tenant", "author_ization", "content_length"])
def test_names_with_underscores_are_refused(sent, access, recorder, name):
    assert sent(*request("/v1/models", f"{name}: other", key=access.keys["good"])) == 400
    assert not seen(recorder)


@pytest.mark.parametrize(
    "headers",
    [
        ("authorization: Bearer {good}", "authorization: Bearer {other}"),
        ("authorization: Bearer {good}", "authorization: Bearer {good}"),
        ("authorization: Bearer {good}", "Authorization: Bearer " + NO_KEY),
        ("authorization: Bearer {good}", "x-api-key: {other}"),
        ("x-api-key: {good}", "x-api-key: {other}"),
        ("authorization: Bearer {good}, Bearer {other}",),
        ("authorization: Basic {good}",),
        ("authorization: Bearer {good}\x01",),
        ("proxy-authorization: Bearer {good}",),
        ("cookie: authorization=Bearer {good}",),
    ],
)
def test_more_than_one_key_or_a_key_elsewhere_is_none(sent, access, recorder, headers):
    status = sent(*request("/v1/models", *(header.format(**access.keys) for header in headers)))
    assert status in (400, 401)
    assert not seen(recorder)


def test_a_key_that_is_no_text_is_none(sent, recorder):
    assert sent(*request("/v1/models"), b"authorization: Bearer \xff\xfe\x80") == 401
    assert not seen(recorder)


@pytest.mark.parametrize(
    "path",
    [
        "//v1/../metrics", "/v1/../metrics", "/./metrics", "//metrics", "/v1/%2e%2e/metrics", "/v1/..%2fmetrics",
        "/v1/models/..%2f..%2fmetrics", "/v1/..%5cmetrics", "/v1/..\\metrics", "/%2fmetrics", "/metrics?x=/health",
        "/health/../metrics", "/m%65trics", "/metrics/", "/metrics%00", "/METRICS", "/metrics;a=b",
        "https://localhost/metrics", "/health%3f/../metrics", "/metrics#/health",
    ],
)  # fmt: skip
def test_no_spelling_of_a_path_passes_by_its_scope(sent, access, recorder, path):
    """What comes through is asked for by a name that the gateway does not take for /metrics."""
    assert sent(*request(path)) in (400, 401)
    assert not seen(recorder)
    status = sent(*request(path, key=access.keys["good"]))
    assert status in (200, 400, 403)
    assert "/metrics" not in seen(recorder)


def test_a_grpc_content_type_does_not_make_another_path(sent, access, recorder):
    sent(*request("/metrics", "content-type: application/grpc", "te: trailers", key=access.keys["good"]))
    assert not seen(recorder)


SMUGGLED = b"GET /smuggled HTTP/1.1\r\nhost: localhost\r\n\r\n"


@pytest.mark.parametrize(
    "headers",
    [
        ("content-length: 5", "transfer-encoding: chunked"),
        ("transfer-encoding: chunked", "transfer-encoding: identity"),
        ("transfer-encoding: chunked, identity",),
        ("transfer-encoding: xchunked",),
        ("transfer-encoding : chunked",),
        ("transfer-encoding:\x0bchunked",),
        ("content-length: 5", "content-length: 50"),
        ("content-length: 5, 50",),
        ("content-length: +5",),
        ("content-length: 0x5",),
        ("content-length: -1",),
    ],
)
def test_a_body_of_two_lengths_is_refused(sent, access, recorder, headers):
    status = sent(*request(CHAT, *headers, key=access.keys["good"], method="POST"), body=b"0\r\n\r\n" + SMUGGLED)
    assert status in (0, 400, 501)
    assert not seen(recorder)


def test_later_requests_on_a_connection_are_authorized_too(sent, access, recorder):
    lines = request(CHAT, "content-length: 2", key=access.keys["good"], method="POST")
    assert sent(*lines, body=b"{}" + SMUGGLED) == 200
    assert sent(*request("/smuggled")) == 401
    assert not seen(recorder)


@pytest.mark.parametrize("headers", [("x-a: " + "a" * 40_000,), tuple(f"x-{number}: 1" for number in range(150))])
def test_too_many_headers_are_refused(sent, access, recorder, headers):
    assert sent(*request("/v1/models", *headers, key=access.keys["good"])) == 431
    assert not seen(recorder)


@pytest.mark.parametrize(
    "line", ["GET /v1/models HTTP/2.0", "G\x00T / HTTP/1.1", "GET", "CONNECT localhost:22 HTTP/1.1"]
)
def test_invalid_requests_are_refused(sent, access, recorder, line):
    assert sent(line, "host: localhost", f"authorization: Bearer {access.keys['good']}") in (0, 400, 401, 403, 404, 426)
    assert not seen(recorder)


@pytest.mark.parametrize("kind", ["closed", "silent", "plain"])
async def test_nothing_passes_without_an_authorization_server(tmp_path, gateway, access, recorder, kind):
    """The port of ext_authz is closed, or accepts connections without answering, or has no TLS."""
    (edge, admin, closed) = ports.free_ports(3)
    with socket.create_server(("127.0.0.1", 0)) as silent, recording() as plain:
        port = {"closed": closed, "silent": silent.getsockname()[1], "plain": plain.port}[kind]
        upstreams = {**gateway.upstreams, "gateway_rest": recorder.port, "ext_authz": port}
        addresses = dataclasses.replace(
            gateway, edge=edge, admin=admin, upstreams=upstreams, plain=frozenset(("gateway_rest",)), authz_seconds=0.5
        )
        with envoy.running(tmp_path, addresses) as front, http_client(front, access) as client:
            recorder.heads.clear()
            began = time.monotonic()
            refused = client.post(CHAT, json={}, headers=access.headers("good"))
            assert time.monotonic() - began < QUICKLY
            assert refused.status_code == 503
            assert refused.headers["retry-after"] == "1"
            assert refused.json()["error"]["code"] == "service_unavailable"
            assert "pass" in refused.json()["error"]["message"]
            assert client.get("/health").status_code == 503
            async with grpc_channel(front, access) as channel:
                stub = inference_pb2_grpc.InferenceServiceStub(channel)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stub.ListModels(
                        inference_pb2.ListModelsRequest(), metadata=tuple(access.headers("good").items())
                    )
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "pass" in caught.value.details()
            assert not seen(recorder)
