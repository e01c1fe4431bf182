"""A request's times in its answer, on the operator's wish."""

import pytest
from support.gateway.rest_harness import RawClient, rest_side, say
from support.gateway.scripted_gateway import running

NAMES = {"time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second"}
ON = {"enable_per_request_metrics": True}
BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": "Hi"},
}


@pytest.mark.parametrize("path", BODIES)
async def test_documents_and_the_usage_of_streams_have_them(path):
    async with running(lambda submit: [260, 261, 262, 4], **ON) as gateway, RawClient.connect(gateway.port) as client:
        body = {**BODIES[path], "max_tokens": 8}
        document = (await client.request("POST", path, body)).json["metrics"]
        stream = {**body, "stream": True, "stream_options": {"include_usage": True}}
        *before, last = (await client.request("POST", path, stream)).events
        assert not any("metrics" in event for event in before)
        # Three steps of 2 ms. If the gateway receives the first token late, it measures less.
        longest = document["generation_time_ms"]
        for _ in range(20):
            if longest >= 6:
                break
            again = (await client.request("POST", path, body)).json["metrics"]
            longest = max(longest, again["generation_time_ms"])
        assert longest >= 6
        for metrics in (document, last["metrics"]):
            assert metrics.keys() == NAMES
            assert metrics["time_to_first_token_ms"] > 0
            assert metrics["generation_time_ms"] > 0
            assert metrics["mean_itl_ms"] == pytest.approx(metrics["generation_time_ms"] / 3, rel=0.01)
            assert metrics["tokens_per_second"] == pytest.approx(4000 / metrics["generation_time_ms"], rel=0.01)


@pytest.mark.parametrize("path", BODIES)
async def test_without_the_setting_answers_are_as_before(path):
    async with rest_side(say("x")) as rest:
        assert "metrics" not in (await rest.post(path, BODIES[path])).json


async def test_one_token_has_no_time_between_tokens():
    async with running(lambda submit: [4], **ON) as gateway, RawClient.connect(gateway.port) as client:
        metrics = (await client.request("POST", "/v1/completions", {"prompt": "Hi"})).json["metrics"]
        assert (metrics["mean_itl_ms"], metrics["tokens_per_second"]) == (None, None)
