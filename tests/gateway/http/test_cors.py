"""CORS of the whole gateway over raw HTTP: configured origins, hostile ones, and pages at a gateway without keys."""

import contextlib

import pytest
from support.gateway.access_rig import key_file
from support.gateway.rest_harness import RawClient, rest_side, say
from support.gateway.scripted_gateway import running

from baton.gateway.config import GatewayConfig
from baton.gateway.http.cors import EXPOSED
from baton.rpc.errors import InvalidRequest

APP = "https://app.example.com"
CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Hi"}]}
HOSTILE = [
    "null",
    "https://evil.example",
    "https://app.example.com.evil.example",
    "https://evilapp.example.com",
    "http://app.example.com",
    "https://app.example.com:8443",
    "https://app.example.com/",
    "https://app.example.com@evil.example",
    "HTTPS://APP.EXAMPLE.COM",
    "https://app.example.com, https://evil.example",
    "*",
    "",
    "https://app.example.com\x7f",
    "x" * 4000,
]


@contextlib.asynccontextmanager
async def gateway(tmp_path, tenant=None, **settings):
    """A gateway with keys; `ask` sends one request of a page."""
    path, (key,) = key_file(tmp_path, [{"tenant": "acme"}], {"acme": tenant or {"requests_per_minute": 100}})
    async with running(lambda submit: [10, 11, 4], api_keys=str(path), **settings) as one:

        async def ask(method, path, body=None, origin=APP, key=key, **headers):
            fields = {"origin": origin, **({"authorization": f"Bearer {key}"} if key else {}), **headers}
            async with RawClient.connect(one.port) as client:
                return await client.request(method, path, body, fields)

        yield ask


def preflight(method="POST", headers="authorization,content-type"):
    return {"access-control-request-method": method, "access-control-request-headers": headers}


def cors_of(answer):
    return {name: value for name, value in answer.headers.items() if name.startswith("access-control")}


async def test_without_origins_no_cors_header_is_sent(tmp_path):
    async with gateway(tmp_path) as ask:
        for answer in (await ask("POST", CHAT, BODY), await ask("OPTIONS", CHAT, key="", **preflight())):
            assert answer.status in (200, 204)
            assert cors_of(answer) == {}
            assert "vary" not in answer.headers


async def test_a_named_origin_reads_answers_streams_errors_and_their_headers(tmp_path):
    async with gateway(tmp_path, cors_origins=(APP,)) as ask:
        whole = await ask("POST", CHAT, BODY)
        streamed = await ask("POST", CHAT, {**BODY, "stream": True})
        errors = [
            await ask("POST", CHAT, BODY, key="wrong"),
            await ask("POST", CHAT, b"{"),
            await ask("GET", "/v1/nothing"),
            await ask("PUT", CHAT, BODY),
            await ask("GET", "/v1/models", **{"x-request-id": "a b"}),
        ]
    assert [answer.status for answer in errors] == [401, 400, 404, 405, 400]
    for answer in (whole, streamed, *errors):
        assert cors_of(answer)["access-control-allow-origin"] == APP
        assert answer.headers["vary"] == "origin"
    exposed = set(whole.headers["access-control-expose-headers"].split(", "))
    told = {name for name in whole.headers if name.startswith(("x-ratelimit", "x-request-id"))}
    assert {"x-request-id", "x-ratelimit-remaining-requests"} <= told <= exposed == set(EXPOSED)


async def test_clients_over_a_limit_get_a_retry_delay(tmp_path):
    async with gateway(tmp_path, {"requests_per_minute": 1}, cors_origins=(APP,)) as ask:
        await ask("POST", CHAT, BODY)
        answer = await ask("POST", CHAT, BODY)
    assert answer.status == 429
    exposed = answer.headers["access-control-expose-headers"].split(", ")
    assert "retry-after" in answer.headers
    assert "retry-after" in exposed


async def test_a_preflight_needs_no_key_and_names_the_routes_methods_and_the_asked_headers(tmp_path):
    async with gateway(tmp_path, cors_origins=("http://localhost:3000", APP)) as ask:
        answer = await ask("OPTIONS", CHAT, key="", **preflight(headers="Authorization, x-stainless-os"))
        plain = await ask("OPTIONS", CHAT, key="")
        unknown = await ask("OPTIONS", "/v1/nothing", key="", **preflight())
    assert answer.status == 204
    assert answer.headers["access-control-allow-origin"] == APP
    assert {"OPTIONS", "POST"} <= set(answer.headers["access-control-allow-methods"].split(", "))
    assert answer.headers["access-control-allow-headers"] == "authorization, x-stainless-os"
    assert int(answer.headers["access-control-max-age"]) > 0
    assert "origin" in answer.headers["vary"]
    assert "access-control-request-headers" in answer.headers["vary"]
    assert "access-control-allow-methods" not in cors_of(plain)
    assert unknown.status == 404


@pytest.mark.parametrize("names", ["x: y", "a,,b", "a\tb", "ä", "(", "x" * 5000, ""])
async def test_odd_header_names_are_not_given_back(tmp_path, names):
    async with gateway(tmp_path, cors_origins=(APP,)) as ask:
        answer = await ask("OPTIONS", CHAT, key="", **preflight(headers=names.encode().decode("latin-1")))
    assert answer.status == 204
    assert "access-control-allow-headers" not in cors_of(answer)


async def test_hostile_origins_get_no_cors_headers(tmp_path):
    async with gateway(tmp_path, cors_origins=(APP,)) as ask:
        for origin in HOSTILE:
            for answer in (
                await ask("GET", "/v1/models", origin=origin),
                await ask("OPTIONS", CHAT, origin=origin, key="", **preflight()),
            ):
                if answer.status != 400:  # some are no header values at all
                    assert answer.status in (200, 204)
                    assert cors_of(answer) == {}, origin
                    assert answer.headers["vary"] == "origin"


async def test_any_origin_is_never_allowed_with_credentials(tmp_path):
    async with gateway(tmp_path, cors_origins=("*",)) as ask:
        answers = [
            await ask("POST", CHAT, BODY, origin="https://whoever.example", cookie="a=b"),
            await ask("OPTIONS", CHAT, origin="null", key="", **preflight()),
        ]
    for answer in answers:
        assert answer.headers["access-control-allow-origin"] == "*"
        assert "access-control-allow-credentials" not in answer.headers


async def test_pages_of_strangers_may_not_use_a_gateway_without_keys():
    async with rest_side(say("Hi")) as rest:
        for origin in ("https://evil.example", "null", "http://127.0.0.1.evil.example:8000", "http://localhost.evil"):
            answer = await rest.post(CHAT, BODY, {"origin": origin, "content-type": "text/plain"})
            assert (answer.status, answer.error["code"]) == (403, "origin_not_allowed")
            assert origin in answer.error["message"]
        # A name of theirs that leads to this machine makes them its own pages; it is no name of this machine.
        rebound = {"origin": "http://evil.example:8000", "host": "evil.example:8000"}
        assert (await rest.post(CHAT, BODY, rebound)).status == 403
        assert not rest.generator.started
        for origin in ("http://127.0.0.1:3000", "http://localhost:8000", "http://[::1]:1", "http://app.localhost"):
            assert (await rest.post(CHAT, BODY, {"origin": origin})).status == 200
        assert (await rest.post(CHAT, BODY)).status == 200


@pytest.mark.parametrize(
    "settings", [{"cors_origins": ("https://evil.example",)}, {"cors_origins": ("*",)}, {"allow_anonymous": True}]
)
async def test_a_gateway_without_keys_accepts_the_configured_origins(settings):
    async with rest_side(say("Hi"), **settings) as rest:
        assert (await rest.post(CHAT, BODY, {"origin": "https://evil.example"})).status == 200


@pytest.mark.parametrize(
    "origins",
    [
        ("app.example.com",),
        ("https://app.example.com/",),
        ("https://app.example.com/path",),
        ("https://App.example.com",),
        ("https://*.example.com",),
        ("https://app.example.com:443",),
        ("http://app.example.com:80",),
        ("https://app.example.com:99999",),
        ("https://user@app.example.com",),
        ("null",),
        ("",),
        ("https://a b",),
        ("*", APP),
    ],
)
def test_invalid_origins_are_refused_at_the_start(origins):
    with pytest.raises(InvalidRequest, match="cors_origins") as caught:
        GatewayConfig(cors_origins=origins).validate()
    assert caught.value.field == "cors_origins"


@pytest.mark.parametrize("origin", [APP, "http://localhost:3000", "http://[::1]:8080", "tauri://localhost", "*"])
def test_origins_of_browsers_and_of_desktop_programs_are_taken(origin):
    GatewayConfig(cors_origins=(origin,)).validate()
