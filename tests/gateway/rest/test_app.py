"""Routes, request ids, and the routes that run no generation."""

import asyncio

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.gateway.rest_harness import rest_side, say

from baton.gateway.version import VERSION


@pytest.mark.parametrize("path", ["/v1/nothing", "/v1/models/", "/v1", "//v1/models", "/docs/"])
async def test_an_unknown_path_is_a_404_in_openais_form(path):
    async with rest_side() as rest:
        answer = await rest.request("GET", path)
    assert answer.status == 404
    assert answer.error["type"] == "invalid_request_error"


async def test_a_wrong_method_is_a_405_with_the_allowed_ones():
    async with rest_side() as rest:
        for method, path, allowed in (("GET", "/v1/completions", "OPTIONS, POST"), ("DELETE", "/health", "GET, HEAD")):
            answer = await rest.request(method, path)
            assert answer.status == 405
            assert answer.headers["allow"].startswith(allowed)
            assert answer.error["message"]


async def test_options_returns_the_methods():
    async with rest_side() as rest:
        answer = await rest.request("OPTIONS", "/v1/completions")
        assert answer.status == 204
        assert answer.headers["allow"] == "OPTIONS, POST"
        assert (await rest.request("OPTIONS", "/nothing")).status == 404


async def test_a_query_does_not_change_the_route():
    async with rest_side() as rest:
        assert (await rest.request("GET", "/health?api-version=1")).status == 200


async def test_models_are_listed_and_found_by_name():
    async with rest_side() as rest:
        listed = (await rest.request("GET", "/v1/models")).json
        found = (await rest.request("GET", "/v1/models/storyteller-7m")).json
        unknown = await rest.request("GET", "/v1/models/org/other%20one")
    assert listed["object"] == "list"
    assert listed["data"] == [found]
    assert found["id"] == "storyteller-7m"
    assert found["object"] == "model"
    assert found["max_model_len"] == 2048
    assert unknown.status == 404
    assert unknown.error["code"] == "model_not_found"
    assert "org/other one" in unknown.error["message"]


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/storyteller-7m"])
async def test_models_are_listed_from_the_first_report_of_a_worker_on(path):
    async with rest_side() as rest:
        model = rest.catalog.get("")
        info, model.info = model.info, None
        answers = [
            await rest.request("GET", path, headers=headers) for headers in ({}, {"anthropic-version": "2023-06-01"})
        ]
        model.info = info
        served = await rest.request("GET", path)
    assert [answer.status for answer in answers] == [503, 529]
    assert all("no worker serves the model storyteller-7m yet" in answer.error["message"] for answer in answers)
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in answers)
    assert served.status == 200


async def test_tokenize_and_detokenize_are_each_others_inverse():
    async with rest_side() as rest:
        body = {"prompt": "Once upon a time", "return_token_strs": True, "add_special_tokens": False}
        tokens = (await rest.post("/tokenize", body)).json
        assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
        assert tokens["max_model_len"] == 2048
        back = (await rest.post("/detokenize", {"tokens": tokens["tokens"]})).json
        assert back["prompt"] == "Once upon a time"


async def test_tokenize_renders_chats():
    async with rest_side() as rest:
        messages = [{"role": "user", "content": "Hi"}]
        tokens = (await rest.post("/tokenize", {"messages": messages})).json
        text = (await rest.post("/detokenize", {"tokens": tokens["tokens"]})).json["prompt"]
        assert text.endswith("<|im_start|>assistant\n")
        assert tokens["token_strs"] is None


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "other"}, "model"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens.0"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0"),
        ("/detokenize", {"tokens": [2**40]}, "tokens.0"),
    ],
)
async def test_wrong_token_requests_name_the_field(path, body, field):
    async with rest_side() as rest:
        answer = await rest.post(path, body)
    assert answer.status in (400, 404)
    assert answer.error["param"] == field


async def test_health_is_ok_while_ready_reports_what_is_missing():
    async with rest_side() as rest:
        assert (await rest.request("GET", "/ready")).json == {"ready": True, "missing": []}
        rest.missing.append("no worker for the model m")
        answer = await rest.request("GET", "/ready")
        assert answer.status == 503
        assert answer.json == {"ready": False, "missing": ["no worker for the model m"]}
        health = await rest.request("GET", "/health")
        assert (health.status, health.body) == (200, b"")


async def test_a_model_without_workers_is_a_503_with_retry_after():
    async with rest_side() as rest:
        rest.catalog.get("").info = None
        for answer in (await rest.chat(), await rest.complete()):
            assert answer.status == 503
            assert "retry-after" in answer.headers


async def test_the_version_is_the_packages():
    async with rest_side() as rest:
        assert (await rest.request("GET", "/version")).json == {"version": VERSION}


@pytest.mark.parametrize("request_id", ["Root=1-67891233-abcdef012345678912345678", "a", "x" * 256])
async def test_a_request_id_is_returned(request_id):
    async with rest_side() as rest:
        answer = await rest.request("GET", "/health", headers={"x-request-id": request_id})
    assert answer.headers["x-request-id"] == request_id


@pytest.mark.parametrize("request_id", ["", "a b", "x" * 257, "naïve"])
async def test_a_request_id_that_logs_could_not_carry_is_refused(request_id):
    async with rest_side() as rest:
        answer = await rest.request("GET", "/health", headers={"x-request-id": request_id})
    assert answer.status == 400
    assert answer.error["param"] == "x-request-id"
    assert "x-request-id" not in answer.headers


async def test_requests_without_an_id_get_one_each():
    async with rest_side() as rest:
        ids = {(await rest.request("GET", "/health")).headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3


async def test_metrics_count_requests_times_and_tokens():
    async with rest_side(say("a", "b", "c")) as rest:
        await rest.chat(stream=True)
        await rest.chat(n=0)
        await rest.request("GET", "/nothing")
        answer = await rest.request("GET", "/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(answer.body.decode())
        for sample in family.samples
    }
    assert samples["baton_gateway_requests_total", "/v1/chat/completions", "200"] == 1
    assert samples["baton_gateway_requests_total", "/v1/chat/completions", "400"] == 1
    assert samples["baton_gateway_requests_total", "unknown", "404"] == 1
    assert samples["baton_gateway_rejected_total", "invalid_request_error"] == 1
    assert samples["baton_gateway_ttft_seconds_count",] == 1
    assert samples["baton_gateway_e2e_seconds_count",] == 1
    assert samples["baton_gateway_itl_seconds_count",] == 2
    assert samples["baton_gateway_itl_seconds_bucket", "+Inf"] == 2
    assert samples["baton_gateway_output_tokens_total",] == 3
    assert samples["baton_gateway_in_flight",] == 0
    assert samples["baton_gateway_connections",] == 1
    assert samples["baton_gateway_placements_total",] == 0


async def test_load_counts_running_requests_and_ping_is_health():
    async with rest_side() as rest:
        assert (await rest.request("GET", "/load")).json == {"server_load": 0}
        running = asyncio.create_task(rest.chat(n=3))
        generation = await rest.generator.next()
        assert (await rest.request("GET", "/load")).json == {"server_load": 3}
        for index in range(3):
            generation.finish(index)
        generation.done(0)
        assert (await running).status == 200
        for method in ("GET", "POST"):
            answer = await rest.request(method, "/ping")
            assert (answer.status, answer.body) == (200, b"")
