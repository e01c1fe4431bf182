"""Sessions and pinned workers: what of a request names them, and who may."""

import pytest
from support.gateway.rest_harness import RawClient, rest_side, say
from support.gateway.scripted_gateway import running

from baton.gateway.access.admin_check import AdminCheck
from baton.gateway.access.gate import OpenGate
from baton.gateway.access.identity import ALL_SCOPES, Identity, Scope, Tenant
from baton.gateway.serving.affinity import session_name
from baton.rpc.errors import PermissionDenied

MESSAGES = [{"role": "user", "content": "Hi"}]
BODIES = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 4, "model": "storyteller-7m"},
    "/inference/v1/generate": {"token_ids": [5, 6]},
}


def named(name):
    return session_name("", name)


async def sessions(rest, *requests):
    """Sends requests one after another and returns their sessions."""
    for path, body, headers in requests:
        answer = await rest.post(path, {**BODIES[path], **body}, headers)
        assert answer.status == 200, answer.body
        assert "x-baton-ignored" not in answer.headers
    return [one.request.session_id for one in rest.generator.started[-len(requests) :]]


@pytest.mark.parametrize("path", BODIES)
async def test_the_header_names_the_session_at_every_route(path):
    async with rest_side(say("x")) as rest:
        assert await sessions(rest, (path, {}, {"x-session-id": "s1"})) == [named("s1")]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
async def test_the_header_goes_before_the_key_and_the_key_before_the_user(path):
    async with rest_side(say("x")) as rest:
        both = {"prompt_cache_key": "k", "user": "u"}
        assert await sessions(rest, (path, both, {"x-session-id": "s"}), (path, both, {})) == [named("s"), named("k")]


async def test_the_user_names_a_session_where_nothing_else_does():
    async with rest_side(say("x")) as rest:
        chat = "/v1/chat/completions"
        assert await sessions(rest, (chat, {"user": "u"}, {}), (chat, {"user": ""}, {})) == [named("u"), ""]


async def test_responses_that_continue_each_other_are_one_session():
    async with rest_side(say("x")) as rest:
        ids = []
        for _ in range(3):
            previous = {"previous_response_id": ids[-1]} if ids else {}
            ids.append((await rest.post("/v1/responses", {"input": "Hi", **previous})).json["id"])
        first, *others = [one.request.session_id for one in rest.generator.started]
        assert others == [first, first] == [named(ids[0])] * 2
        conversation = (await rest.post("/v1/conversations", {})).json["id"]
        one, two = await sessions(rest, *[("/v1/responses", {"conversation": conversation}, {})] * 2)
        assert one == two == named(conversation) != first


def test_sessions_of_tenants_are_never_the_same():
    assert session_name("a", "bc") != session_name("ab", "c")
    assert session_name("a", "s") != session_name("b", "s")


@pytest.mark.parametrize(("header", "value"), [("x-session-id", ""), ("x-session-id", "s" * 513), ("x-worker-id", "")])
async def test_wrong_headers_are_refused(header, value):
    async with rest_side(say("x")) as rest:
        refused = await rest.post("/v1/completions", {"prompt": "Hi"}, {header: value})
        assert (refused.status, refused.error["param"]) == (400, header)
        assert not rest.generator.started


async def test_a_worker_is_pinned():
    async with rest_side(say("x")) as rest:
        for path, body in BODIES.items():
            assert (await rest.post(path, body, {"x-worker-id": "w-1"})).status == 200
        assert {one.request.worker_id for one in rest.generator.started} == {"w-1"}


async def test_web_pages_pin_no_worker_of_a_gateway_without_keys():
    async with rest_side(say("x"), cors_origins=("https://a.example",)) as rest:
        refused = await rest.post(
            "/v1/completions", {"prompt": "Hi"}, {"x-worker-id": "w", "origin": "https://a.example"}
        )
        assert (refused.status, "X-Worker-Id" in refused.error["message"]) == (403, True)


@pytest.mark.parametrize(
    ("gate", "listen", "scopes", "problem"),
    [
        (object(), "0.0.0.0:80", {Scope.ADMIN}, None),
        (object(), "127.0.0.1:80", {Scope.INFERENCE}, "scope admin"),
        (OpenGate(), "127.0.0.1:80", ALL_SCOPES, None),
        (OpenGate(), "0.0.0.0:80", ALL_SCOPES, "--api-keys"),
    ],
)
def test_only_operators_pass(gate, listen, scopes, problem):
    check = AdminCheck(gate, listen)
    if problem is None:
        check.check(Identity(Tenant(), scopes), {}, "X-Worker-Id")
    else:
        with pytest.raises(PermissionDenied, match=problem):
            check.check(Identity(Tenant(), scopes), {}, "X-Worker-Id")


async def test_the_router_is_told_both():
    async with running(lambda submit: [260, 4]) as gateway, RawClient.connect(gateway.port) as client:
        headers = {"x-session-id": "s", "x-worker-id": "w1"}
        answer = await client.request("POST", "/v1/completions", {"prompt": "Hi"}, headers)
        assert answer.status == 200
        place = gateway.router.places[-1]
        assert (place.session_id, place.worker_id) == (named("s"), "w1")
