"""Host headers at the gateway: without keys only names of this machine, and those that are allowed."""

import json
import socket

import pytest
from support.gateway.access_rig import key_file
from support.gateway.rest_harness import RawClient, rest_side, say
from support.gateway.scripted_gateway import running

from baton.gateway.config import GatewayConfig
from baton.gateway.http.host_check import host_check_of
from baton.rpc.errors import InvalidRequest

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
# What pages of another name read before.
READS = ("/v1/models", "/v1/chat/completions", "/metrics", "/load", "/", "/playground/app.js", "/openapi.json", "/no")


@pytest.mark.parametrize("settings", [{}, {"allow_anonymous": True}])
async def test_a_gateway_without_keys_serves_no_other_name(settings):
    async with rest_side(say("Hi"), **settings) as rest:
        for path in READS:
            for method in ("GET", "HEAD", "OPTIONS"):
                answer = await rest.request(method, path, headers={"host": "evil.example:8000"})
                assert answer.status == 403, (method, path)
        answer = await rest.post("/v1/chat/completions", CHAT, {"host": "evil.example"})
        assert (answer.status, answer.error["code"]) == (403, "host_not_allowed")
        assert "'evil.example'" in answer.error["message"]
        assert "--allowed-hosts" in answer.error["message"]
        assert not rest.generator.started
        for host in ("localhost", "127.0.0.1:8000", "[::1]", "app.localhost:1"):
            assert (await rest.post("/v1/chat/completions", CHAT, {"host": host})).status == 200


async def test_probes_are_answered_under_any_name():
    async with rest_side() as rest:
        for path in ("/health", "/ping", "/ready"):
            assert (await rest.request("GET", path, headers={"host": "kubelet.example"})).status == 200


async def test_the_host_of_an_absolute_target_goes_before_the_header():
    async with rest_side() as rest, RawClient.connect(rest.port) as client:
        await client.send(b"GET http://evil.example/version HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert (await client.answer()).status == 403
        await client.send(b"GET http://localhost:1/version HTTP/1.1\r\nhost: evil.example\r\n\r\n")
        assert (await client.answer()).status == 200


async def test_a_client_of_http_1_0_may_send_no_host():
    async with rest_side() as rest, RawClient.connect(rest.port) as client:
        await client.send(b"GET /version HTTP/1.0\r\n\r\n")
        assert (await client.answer()).status == 200


async def test_allowed_names_are_served_and_their_own_pages_may_ask():
    async with rest_side(say("Hi"), allowed_hosts=("gw.example", "*.lab.example")) as rest:
        for host in ("gw.example", "a.lab.example:8443"):
            own = {"host": host, "origin": f"https://{host}"}
            assert (await rest.post("/v1/chat/completions", CHAT, own)).status == 200
            other = {"host": host, "origin": "https://evil.example"}
            assert (await rest.post("/v1/chat/completions", CHAT, other)).status == 403
        assert (await rest.request("GET", "/version", headers={"host": "a.gw.example"})).status == 403
    async with rest_side(allowed_hosts=("*",)) as rest:
        assert (await rest.request("GET", "/version", headers={"host": "whatever.example"})).status == 200


async def test_a_gateway_with_keys_checks_hosts_if_configured(tmp_path):
    path, (key,) = key_file(tmp_path, [{"tenant": "acme"}], {"acme": {}})
    for allowed, status in (((), 200), (("gw.example",), 403)):
        async with (
            running(lambda submit: [10, 4], api_keys=str(path), allowed_hosts=allowed) as gateway,
            RawClient.connect(gateway.port) as client,
        ):
            headers = {"host": "other.example", "authorization": f"Bearer {key}"}
            assert (await client.request("GET", "/v1/models", headers=headers)).status == status
            headers["host"] = "gw.example"
            assert (await client.request("GET", "/v1/models", headers=headers)).status == 200


async def test_a_service_beyond_loopback_is_served_under_its_machines_name():
    name = socket.gethostname().lower().encode()
    host_check_of((), False, ("0.0.0.0:8000",)).check({b"host": name + b":8000"})
    host_check_of((), False, ("gw.example:8000",)).check({b"host": b"gw.example:8000"})


def test_a_wrong_allowed_host_is_named():
    with pytest.raises(InvalidRequest, match="allowed_hosts: 'http://a'"):
        GatewayConfig(model="m", allowed_hosts=("http://a",)).validate()


async def test_long_hosts_are_not_repeated_in_errors():
    async with rest_side() as rest:
        answer = await rest.request("GET", "/version", headers={"host": "e" * 5000})
        assert answer.status == 403
        assert len(json.dumps(answer.error)) < 1000
