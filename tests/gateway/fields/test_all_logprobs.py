"""Log-probabilities of the whole vocabulary, if the operator allows them."""

import pytest
from support.gateway.rest_harness import INFO, rest_side, say

MESSAGES = [{"role": "user", "content": "Hi"}]
ASKING = [
    ("/v1/chat/completions", {"messages": MESSAGES, "logprobs": True, "top_logprobs": -1}, "top_logprobs", "logprobs"),
    ("/v1/chat/completions", {"messages": MESSAGES, "prompt_logprobs": -1}, "prompt_logprobs", "prompt_logprobs"),
    ("/v1/completions", {"prompt": "Hi", "logprobs": -1}, "logprobs", "logprobs"),
    ("/v1/completions", {"prompt": "Hi", "prompt_logprobs": -1}, "prompt_logprobs", "prompt_logprobs"),
    ("/inference/v1/generate", {"token_ids": [5, 6], "sampling_params": {"logprobs": -1}}, "sampling_params.logprobs",
     "logprobs"),
    ("/inference/v1/generate", {"token_ids": [5, 6], "sampling_params": {"prompt_logprobs": -1}},
     "sampling_params.prompt_logprobs", "prompt_logprobs"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "param", "name"), ASKING)
async def test_all_of_them_are_asked_for_where_the_operator_allows_it(path, body, param, name):
    async with rest_side(say("x"), max_logprobs=-1) as rest:
        assert (await rest.post(path, body)).status == 200
        (one,) = rest.generator.started
        assert getattr(one.request.sampling, name) == INFO.vocab_size
    async with rest_side(say("x")) as rest:
        refused = await rest.post(path, body)
        assert (refused.status, refused.error["param"]) == (400, param)
        assert "whole vocabulary" in refused.error["message"]
        assert not rest.generator.started


@pytest.mark.parametrize("value", [-2, 1.5, "all"])
async def test_other_values_are_refused(value):
    async with rest_side(say("x"), max_logprobs=-1) as rest:
        refused = await rest.complete(prompt_logprobs=value)
        assert (refused.status, refused.error["param"]) == (400, "prompt_logprobs")


async def test_any_number_is_allowed_without_a_limit():
    async with rest_side(say("x"), max_logprobs=-1) as rest:
        assert (await rest.complete(logprobs=900)).status == 200
