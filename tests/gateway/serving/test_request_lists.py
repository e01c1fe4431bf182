"""Lists of a request are sent once for each choice and prompt: they are limited together, before anything runs."""

import grpc
import pytest
from support.gateway.rest_harness import rest_side, say
from support.gateway.scripted_gateway import running
from support.processes.cpu_seconds import cheapest_of

from baton.v1 import inference_pb2 as pb
from baton.v1.inference_pb2_grpc import InferenceServiceStub

BIAS = {str(token): 1 for token in range(1000)}
WORDS = [f"word {index} and some more of it" for index in range(1024)]
LARGE = {"structured_outputs": {"json": {"enum": [f"value {index}" for index in range(5000)]}}}
CHATS = [[{"role": "user", "content": "Hi"}]] * 1000
BATCH, COMPLETION, CHAT = "/v1/chat/completions/batch", "/v1/completions", "/v1/chat/completions"
ONE = {"messages": CHATS[0]}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (COMPLETION, {"prompt": ["Hi"] * 1000, "bad_words": WORDS}, "bad_words"),
        (COMPLETION, {"prompt": ["Hi"] * 1000, "logit_bias": BIAS}, "logit_bias"),
        (COMPLETION, {"prompt": ["Hi"] * 1000, **LARGE}, "structured_outputs.json"),
        (COMPLETION, {"prompt": ["Hi"] * 8, "n": 100, "allowed_token_ids": list(range(5, 1000))}, "allowed_token_ids"),
        (BATCH, {"messages": CHATS, "logit_bias": BIAS}, "logit_bias"),
        (BATCH, {"messages": CHATS, **LARGE}, "structured_outputs.json"),
        (f"{COMPLETION}/render", {"prompt": ["Hi"] * 1000, "logit_bias": BIAS}, "logit_bias"),
        (COMPLETION, {"prompt": ["Hi"] * 1000, "vllm_xargs": {"k": "x" * 100_000}}, "vllm_xargs"),
        (COMPLETION, {"prompt": ["Hi"] * 1000, "cache_salt": "x" * 5000}, "cache_salt"),
        (COMPLETION, {"prompt": ["Hi"] * 1000, "user": "x" * 5000}, "user"),
        (BATCH, {"messages": CHATS, "documents": [{"text": "x" * 1000}] * 2000}, "documents"),
        (BATCH, {"messages": CHATS, "chat_template_kwargs": {"k": "x" * 20_000}}, "chat_template_kwargs"),
        (BATCH, {"messages": [[{"role": "user", "content": "word " * 400}]] * 1000}, "messages"),
        (CHAT, ONE | {"n": 128, "bad_words": WORDS}, "bad_words"),
        (CHAT, ONE | {"vllm_xargs": {f"k{index}": 1 for index in range(60_000)}}, "vllm_xargs"),
        (CHAT, ONE | {"vllm_xargs": {"k": [1] * 500_000}}, "vllm_xargs"),
    ],
)
async def test_long_lists_of_many_choices_are_refused_by_name(path, body, field):
    async with rest_side(say("Hi")) as rest:

        async def refused():
            answer = await rest.post(path, body)
            assert (answer.status, answer.error["param"]) == (400, field)

        assert await cheapest_of(refused, 1.0) < 1.0
        assert not rest.generator.started
        assert rest.admission.in_use == 0


@pytest.mark.parametrize(
    "fields", [{"logit_bias": BIAS}, {"bad_words": WORDS}, LARGE, {"bad_words": ["cat"], "n": 128}]
)
async def test_as_long_lists_of_few_choices_are_served(fields):
    async with rest_side(say("Hi")) as rest:
        assert (await rest.chat(**fields)).status == 200


async def test_grpc_has_the_same_limit():
    async with (
        running(lambda submit: [10, 4]) as gateway,
        grpc.aio.insecure_channel(gateway.config.grpc_listen) as channel,
    ):
        request = pb.GenerateRequest(text="Hi", n=128, sampling={"bad_words": WORDS})
        with pytest.raises(grpc.aio.AioRpcError, match="bad_words is too long for 128 choices") as refused:
            await InferenceServiceStub(channel).Generate(request, timeout=30).read()
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
