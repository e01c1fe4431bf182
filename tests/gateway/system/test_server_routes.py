"""Routes about the server itself: its settings, its tokenizer, its description, and running requests to end."""

import asyncio
import json

import pytest
from support.gateway.rest_harness import RawClient, rest_side, say, until

TOKENIZER = {"enable_tokenizer_info_endpoint": True}


async def test_the_tokenizer_is_described_on_the_operators_wish_only():
    async with rest_side() as rest:
        assert (await rest.request("GET", "/tokenizer_info")).status == 404
    async with rest_side(**TOKENIZER) as rest:
        info = (await rest.request("GET", "/tokenizer_info")).json
        assert info["tokenizer_class"] == "PreTrainedTokenizerFast"
        assert "{%" in info["chat_template"]
        assert info["eos_token"]
        assert not {"vocab_file", "name_or_path"} & info.keys()
        refused = await rest.request("GET", "/tokenizer_info?model=other")
        assert (refused.status, refused.error["param"]) == (404, "model")
        assert (await rest.request("GET", "/tokenizer_info?modle=x")).status == 400


async def test_the_server_tells_its_settings_in_both_forms():
    async with rest_side(redis_url="redis://me:secret@127.0.0.1:1/0", max_choices=9) as rest:
        text = (await rest.request("GET", "/server_info")).json
        assert "max_choices=9" in text["vllm_config"]
        settings = (await rest.request("GET", "/server_info?config_format=json")).json
        assert settings["vllm_config"]["max_choices"] == 9
        assert settings["vllm_config"]["redis_url"] == "redis://***@127.0.0.1:1/0"
        assert "secret" not in json.dumps([text, settings])
        (model,) = settings["models"]
        assert (model["names"], model["max_model_len"]) == (["storyteller-7m"], 2048)
        assert settings["system_env"]["tokenizers"]
        refused = await rest.request("GET", "/server_info?config_format=yaml")
        assert (refused.status, refused.error["param"]) == (400, "config_format")


async def test_web_pages_read_no_settings_of_a_gateway_without_keys():
    async with rest_side(cors_origins=("https://a.example",)) as rest:
        answer = await rest.request("GET", "/server_info", headers={"origin": "https://a.example"})
        assert answer.status == 403


async def test_the_description_has_both_addresses_and_can_be_left_out():
    async with rest_side() as rest:
        docs, redoc = [await rest.request("GET", path) for path in ("/docs", "/redoc")]
        assert docs.status == 200
        assert docs.body == redoc.body
        paths = (await rest.request("GET", "/openapi.json")).json["paths"]
        assert {"/abort_requests", "/server_info", "/redoc"} <= paths.keys()
        assert "/tokenizer_info" not in paths
    async with rest_side(no_docs=True) as rest:
        for path in ("/docs", "/redoc", "/openapi.json"):
            assert (await rest.request("GET", path)).status == 404
        assert (await rest.request("GET", "/v1/models")).status == 200


async def test_tokens_only_leaves_tokens_and_the_system():
    async with rest_side(say("x"), tokens_only=True) as rest:
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/tokenize"):
            assert (await rest.post(path, {})).status == 404, path
        assert (await rest.request("GET", "/")).status == 404
        assert (await rest.post("/inference/v1/generate", {"token_ids": [5, 6]})).status == 200
        assert (await rest.post("/abort_requests", {"request_ids": []})).json == {"num_aborted": 0}
        for path in ("/v1/models", "/health", "/metrics", "/openapi.json"):
            assert (await rest.request("GET", path)).status == 200, path


@pytest.mark.parametrize("name", ["mine", "chatcmpl-mine"])
async def test_an_aborted_stream_ends_with_its_output_so_far(name):
    async with rest_side() as rest, RawClient.connect(rest.port) as client:
        chat = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
        request = asyncio.create_task(
            client.request("POST", "/v1/chat/completions", chat, headers={"x-request-id": "mine"})
        )
        generation = await rest.generator.next()
        generation.emit("Once")
        assert (await rest.post("/abort_requests", {"request_ids": [name, name, "other"]})).json == {"num_aborted": 1}
        events = (await request).events
        assert [event["choices"][0]["finish_reason"] for event in events] == [None, None, "abort"]
        assert events[1]["choices"][0]["delta"]["content"] == "Once"


async def test_a_request_that_waits_for_its_worker_is_aborted_as_it_starts():
    async with rest_side() as rest:
        rest.generator.hold = asyncio.Event()
        request = asyncio.create_task(rest.complete("Hi", request_id="early"))
        await until(lambda: rest.admission.in_use)
        assert (await rest.post("/abort_requests", {"request_ids": ["early"]})).json == {"num_aborted": 1}
        rest.generator.hold.set()
        assert (await request).json["choices"][0]["finish_reason"] == "abort"


async def test_every_prompt_of_a_request_is_aborted():
    async with rest_side() as rest:
        request = asyncio.create_task(rest.complete(["a", "b"], request_id="two"))
        await rest.generator.next(1)
        assert (await rest.post("/abort_requests", {"request_ids": ["two"]})).json == {"num_aborted": 1}
        assert [choice["finish_reason"] for choice in (await request).json["choices"]] == ["abort", "abort"]


async def test_an_aborted_response_is_incomplete_and_its_id_will_do():
    async with rest_side() as rest, RawClient.connect(rest.port) as client:
        body = {"input": "Hi", "stream": True}
        request = asyncio.create_task(client.request("POST", "/v1/responses", body))
        generation = await rest.generator.next()
        generation.emit("Once")
        generation.cancel()
        events = [json.loads(line[6:]) for line in (await request).body.decode().split("\n") if line[:6] == "data: "]
        assert events[-1]["type"] == "response.incomplete"
        assert events[-1]["response"]["incomplete_details"] == {"reason": "aborted"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "request_ids"),
        ({"request_ids": "one"}, "request_ids"),
        ({"request_ids": [1]}, "request_ids.0"),
        ({"request_ids": ["a b"]}, "request_ids.0"),
        ({"request_ids": ["x"] * 1025}, "request_ids"),
    ],
)
async def test_wrong_ids_are_refused(body, param):
    async with rest_side() as rest:
        refused = await rest.post("/abort_requests", body)
        assert (refused.status, refused.error["param"]) == (400, param)


async def test_unknown_fields_are_listed_or_refused_as_elsewhere():
    body = {"request_ids": [], "reason": "x"}
    async with rest_side() as rest:
        assert (await rest.post("/abort_requests", body)).headers["x-baton-ignored"] == "reason"
    async with rest_side(strict_fields=True) as rest:
        assert (await rest.post("/abort_requests", body)).error["param"] == "reason"
