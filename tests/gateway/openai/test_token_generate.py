"""POST /inference/v1/generate: token ids in and out, whole and as a stream, and what is refused."""

import pytest
from support.gateway.rest_harness import logprob, rest_side, say

from baton.rpc.errors import InvalidRequest


async def generate(rest, token_ids=(5, 6), **fields):
    return await rest.post("/inference/v1/generate", {"token_ids": list(token_ids), **fields})


def count_to(*token_ids, stop_reason=None):
    def script(generation):
        for index in range(generation.request.n):
            for token_id in token_ids:
                generation.emit("", index, token_ids=(token_id,))
            generation.finish(index, stop_reason=stop_reason)
        generation.done(len(token_ids) * generation.request.n)

    return script


async def test_tokens_go_in_and_come_out():
    async with rest_side(count_to(7, 8, stop_reason=8)) as rest:
        answer = await generate(
            rest, sampling_params={"n": 2, "max_tokens": 4, "stop_token_ids": [8]}, request_id="mine"
        )
        (generation,) = rest.generator.started
        request = generation.request
    assert (request.prompt_token_ids, request.detokenize, request.stop.max_tokens) == ([5, 6], False, 4)
    body = answer.json
    assert body["request_id"] == "mine"
    assert [choice["token_ids"] for choice in body["choices"]] == [[7, 8], [7, 8]]
    assert {(choice["finish_reason"], choice["stop_reason"]) for choice in body["choices"]} == {("stop", 8)}
    assert body["prompt_logprobs"] is None
    assert body["usage"]["completion_tokens"] == 4


async def test_a_stream_is_pieces_then_ends_then_usage():
    async with rest_side(count_to(7, 8)) as rest:
        events = (await generate(rest, stream=True, stream_options={"include_usage": True})).events
    assert [choice["token_ids"] for event in events for choice in event["choices"]] == [[7], [8], []]
    assert events[-2]["choices"][0]["finish_reason"] == "stop"
    assert events[-1]["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_come_where_asked_for(stream):
    def script(generation):
        prompt = None if stream else [logprob("b", -2.0, ("c", -1.0))]
        generation.emit("", logprobs=[logprob("x", -0.5, ("x", -0.5))], prompt_logprobs=prompt)
        generation.finish()
        generation.done(1)

    params = {"logprobs": 1} if stream else {"logprobs": 1, "prompt_logprobs": 1}
    async with rest_side(script) as rest:
        answer = await generate(rest, sampling_params=params, stream=stream)
    body = answer.events[0] if stream else answer.json
    assert body["choices"][0]["logprobs"]["content"][0]["logprob"] == -0.5
    if not stream:
        assert len(body["prompt_logprobs"]) == 2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": ["x"]}, "token_ids.0"),
        ({"token_ids": [99999]}, "token_ids"),
        ({"token_ids": [5] * 3000}, "token_ids"),
        ({"sampling_params": {"temperature": 9}}, "sampling_params.temperature"),
        ({"sampling_params": {"stop": "x"}}, "sampling_params.stop"),
        ({"sampling_params": {"logprobs": 21}}, "sampling_params.logprobs"),
        ({"sampling_params": {"n": 1000}}, "sampling_params.n"),
        ({"sampling_params": {"max_tokens": 0}}, "sampling_params.max_tokens"),
        (
            {"sampling_params": {"response_format": {"type": "json_schema"}}},
            "sampling_params.response_format.json_schema",
        ),
        ({"sampling_params": {"allowed_token_ids": [5] * 5000}}, "sampling_params.allowed_token_ids"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
async def test_a_wrong_field_is_refused_by_name(fields, param):
    async with rest_side(say("x")) as rest:
        answer = await rest.post("/inference/v1/generate", {"token_ids": [5], **fields})
        assert rest.admission.in_use == 0
    assert (answer.status, answer.error["param"]) == (400, param)


@pytest.mark.parametrize("stream", [False, True])
async def test_refusals_of_the_generation_name_the_clients_field(stream):
    async with rest_side() as rest:
        rest.generator.refusal = InvalidRequest("bad_words.1 is empty", field="bad_words.1")
        answer = await generate(rest, sampling_params={"bad_words": ["a", " "]}, stream=stream)
    assert (answer.status, answer.error["param"]) == (400, "sampling_params.bad_words.1")
