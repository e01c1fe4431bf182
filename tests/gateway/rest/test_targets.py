"""What a request's target may be: unknown paths are answered with the likely one, unknown query parameters refused."""

from __future__ import annotations

import time

import pytest
from support.gateway.rest_harness import rest_side, say

from baton.gateway.rest.likely_path import likely_path
from baton.gateway.rest.routing import RouteTable

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Hi"}]}
MESSAGE = {**BODY, "model": "storyteller-7m", "max_tokens": 4}


@pytest.mark.parametrize(
    ("path", "likely"),
    [
        (f"{CHAT}/", CHAT),
        (f"/v1{CHAT}", CHAT),
        ("/chat/completions", CHAT),
        ("//v1//chat/completions", CHAT),
        (f"/openai{CHAT}", CHAT),
        (f"/api{CHAT}", CHAT),
        ("/V1/Chat/Completions", CHAT),
        (f"{CHAT}/batches", f"{CHAT}/batch"),
        ("/v1/chat/completion", CHAT),
        ("/v1/v1/messages", "/v1/messages"),
        ("/messages/count_tokens", "/v1/messages/count_tokens"),
        ("/v1/models/", "/v1/models"),
        ("/v1/models/storyteller-7m/", "/v1/models/storyteller-7m"),
        ("/models/storyteller-7m", "/v1/models/storyteller-7m"),
        ("/v1/health", "/health"),
        ("/v1/tokenize", "/tokenize"),
        ("/health/", "/health"),
    ],
)
async def test_an_unknown_path_is_a_404_with_the_likely_one(path, likely):
    async with rest_side() as rest:
        for method in ("GET", "POST", "OPTIONS"):
            answer = await rest.request(method, path, BODY if method == "POST" else None)
            assert answer.status == 404
            assert answer.error["message"].endswith(f"Did you mean {likely}?")


@pytest.mark.parametrize(
    "path", ["/", "/v1/embeddings", "/wp-login.php", "/v1/" + "x" * 5000, "/%00", "/v1/nothing/at/all"]
)
async def test_an_unknown_path_is_a_404_that_links_the_list(path):
    async with rest_side(no_playground=True) as rest:
        answer = await rest.request("GET", path)
    assert answer.status == 404
    assert answer.error["message"].endswith("GET /openapi.json lists all paths.")
    assert len(answer.body) < 1000


def test_the_likely_path_of_any_target_costs_little():
    table = RouteTable([])
    paths = [f"/v1/{'completions/' * count}" for count in range(50)]
    began = time.process_time()
    for number in range(50):
        likely_path("/" + "v1/completions" * (10 * number), lambda _: False, paths)
        with pytest.raises(Exception, match="Unknown path"):
            table.find("GET", "/" + "v/" * 10_000)
    assert time.process_time() - began < 1.0


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", f"{CHAT}/batches"),
        ("GET", f"{CHAT}/render/messages"),
        ("GET", f"{CHAT}/input"),
        ("DELETE", f"{CHAT}/all"),
        ("GET", f"{CHAT}/batch/messages"),
        ("POST", "/v1/responses/compact"),
        ("GET", "/v1/responses/input_tokens"),
        ("POST", "/v1/responses/input_tokens/cancel"),
        ("GET", "/v1/responses/all/input_items"),
        ("GET", "/v1/responses/resp_0/nothing"),
        ("GET", "/v1/conversations/search"),
        ("GET", "/v1/conversations/search/items"),
        ("GET", "/v1/conversations/search/items/msg_0"),
    ],
)
async def test_a_route_word_is_not_mistaken_for_an_id(method, path):
    async with rest_side() as rest:
        answer = await rest.request(method, path, {"metadata": {}} if method == "POST" else None)
    assert answer.status == 404
    assert answer.error["message"].startswith("Unknown path")


@pytest.mark.parametrize(
    ("method", "path", "body", "known"),
    [
        ("POST", CHAT, BODY, "no query parameters"),
        ("POST", "/v1/completions", {"prompt": "Hi"}, "no query parameters"),
        ("POST", "/v1/messages", MESSAGE, "beta"),
        ("GET", "/health", None, "no query parameters"),
        ("GET", "/metrics", None, "no query parameters"),
        ("GET", "/", None, "no query parameters"),
        ("GET", CHAT, None, "limit, order, after, model, metadata"),
        ("GET", "/v1/responses/resp_0", None, "stream, starting_after"),
        ("GET", "/v1/responses/resp_0/input_items", None, "limit, order, after"),
        ("GET", "/v1/conversations/conv_0/items", None, "limit, order, after"),
    ],
)
async def test_an_unknown_query_parameter_is_a_400_that_names_it_and_the_known_ones(method, path, body, known):
    async with rest_side(say("x")) as rest:
        answer = await rest.request(method, f"{path}?limitt=secret-value&api-version=1", body)
    assert answer.status == 400
    error = answer.json["error"]
    assert "limitt" in error["message"]
    assert known in error["message"]
    assert b"secret" not in answer.body


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (f"{CHAT}?api-version=2024-10-21", BODY),
        ("/v1/messages?beta=true", MESSAGE),
        ("/v1/messages/count_tokens?beta=true", {key: MESSAGE[key] for key in ("messages", "model")}),
        ("/v1/conversations?api-version=1", {}),
    ],
)
async def test_path_additions_of_real_clients_are_accepted(path, body):
    async with rest_side(say("x")) as rest:
        answer = await rest.post(path, body, {"anthropic-version": "2023-06-01"})
    assert answer.status == 200


async def test_codex_lists_the_models_with_its_version():
    async with rest_side() as rest:
        assert (await rest.request("GET", "/v1/models?client_version=0.60.1")).status == 200


async def test_the_parameters_of_lists_are_taken_and_those_that_change_nothing_are_named():
    async with rest_side(say("x")) as rest:
        assert (await rest.request("GET", f"{CHAT}?limit=5&order=asc&after=&metadata[a]=b&model=")).status == 200
        made = (await rest.post("/v1/conversations", {})).json["id"]
        query = "include[]=message.output_text.logprobs&include=reasoning.encrypted_content&limit=2"
        answer = await rest.request("GET", f"/v1/conversations/{made}/items?{query}")
    assert answer.status == 200
    assert answer.headers["x-baton-ignored"] == "include"


async def test_too_many_query_parameters_are_refused():
    async with rest_side() as rest:
        answer = await rest.request("GET", "/v1/models?" + "&".join(f"api-version={number}" for number in range(300)))
    assert answer.status == 400
    assert "256" in answer.error["message"]
