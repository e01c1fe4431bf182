"""The whole gateway service, asked by the official OpenAI client and by gRPC, over a scripted router and worker."""

import asyncio
import contextlib
import socket

import grpc
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.fleet.kvstore_node import eventually
from support.gateway.rest_harness import SAMPLE, RawClient, request_bytes
from support.gateway.scripted_gateway import running
from support.gateway.scripted_services import MODEL, until

from baton.gateway.config import GatewayConfig
from baton.gateway.models.tokenization.tokenizer import Tokenizer
from baton.gateway.server import serve
from baton.rpc.errors import InvalidRequest, NoCapacity, Unavailable
from baton.v1 import inference_pb2 as pb
from baton.v1.inference_pb2_grpc import InferenceServiceStub

STORY = "Once upon a time, naïve 你好 😀 there was a little girl."
MESSAGES = [{"role": "user", "content": "Tell me a story."}]
NAME = "storyteller-7m"


@pytest.fixture(scope="module")
def story_tokens():
    tokenizer = Tokenizer(SAMPLE / "tokenizer.json")
    yield [*tokenizer.encode(STORY, add_special_tokens=False), 4]
    tokenizer.close()


@pytest.fixture
async def gateway(story_tokens):
    async with running(lambda submit: story_tokens) as gateway:
        yield gateway


@pytest.fixture
async def client(gateway):
    url = f"http://127.0.0.1:{gateway.port}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


async def test_the_openai_client_gets_a_chat(gateway, client):
    gateway.worker.cached_tokens = 5
    answer = await client.chat.completions.create(model=NAME, messages=MESSAGES)
    assert answer.choices[0].message.content == STORY
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens_details.cached_tokens == 5
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


async def test_the_openai_client_gets_a_streamed_chat(gateway, client):
    stream = await client.chat.completions.create(
        model=NAME, messages=MESSAGES, stream=True, stream_options={"include_usage": True}, n=2
    )
    texts, finishes, usage = ["", ""], {}, None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            finishes[choice.index] = choice.finish_reason
    assert texts == [STORY] * 2
    assert finishes == {0: "stop", 1: "stop"}
    assert usage.completion_tokens == 2 * len(gateway.worker.script(None))


async def test_the_openai_clients_stream_helper_sums_up(client):
    async with client.chat.completions.stream(model=NAME, messages=MESSAGES) as stream:
        kinds = {event.type async for event in stream}
        final = await stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.content == STORY


async def test_the_openai_client_gets_completions(client, story_tokens):
    answer = await client.completions.create(model=NAME, prompt=["Once", "Hi"], max_tokens=500, echo=True)
    assert [choice.text for choice in answer.choices] == [f"Once{STORY}", f"Hi{STORY}"]
    assert answer.usage.completion_tokens == 2 * len(story_tokens)
    pieces = [
        chunk.choices[0].text
        async for chunk in await client.completions.create(model=NAME, prompt="Hi", max_tokens=500, stream=True)
    ]
    assert "".join(pieces) == STORY


async def test_the_openai_client_gets_logprobs(client):
    chat = await client.chat.completions.create(model=NAME, messages=MESSAGES, logprobs=True, top_logprobs=2)
    content = chat.choices[0].logprobs.content
    assert len(content) == chat.usage.completion_tokens
    assert b"".join(bytes(entry.bytes) for entry in content[:-1]).decode() == STORY
    assert all(len(entry.top_logprobs) == 2 for entry in content)
    text = await client.completions.create(model=NAME, prompt="Hi", logprobs=1, max_tokens=3)
    assert len(text.choices[0].logprobs.tokens) == 3


async def test_stop_strings_end_the_text_and_the_work(gateway, client):
    answer = await client.chat.completions.create(model=NAME, messages=MESSAGES, stop=["there"])
    assert answer.choices[0].message.content == STORY.partition("there")[0]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].stop_reason == "there"
    await until(lambda: gateway.worker.aborts)


async def test_the_openai_client_lists_models(client):
    assert [model.id async for model in client.models.list()] == [NAME]
    assert (await client.models.retrieve(NAME)).id == NAME


async def test_the_openai_client_raises_its_own_errors(gateway, client):
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.chat.completions.create(model="gpt-17", messages=MESSAGES)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        await client.chat.completions.create(model=NAME, messages=MESSAGES, temperature=5)
    assert wrong.value.param == "temperature"
    gateway.router.refusal = NoCapacity("every queue is full", retry_after_ms=2500)
    with pytest.raises(openai.RateLimitError) as full:
        await client.chat.completions.create(model=NAME, messages=MESSAGES)
    assert full.value.response.headers["retry-after"] == "3"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"4096": 1}}, "logit_bias"),
        ({"stop_token_ids": [4096]}, "stop_token_ids"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"stop": ["x"] * 17}, "stop"),
    ],
)
async def test_errors_that_depend_on_the_model_name_the_field(client, fields, param):
    with pytest.raises(openai.BadRequestError) as wrong:
        await client.chat.completions.create(model=NAME, messages=MESSAGES, extra_body=fields)
    assert wrong.value.param == param


async def test_a_worker_that_refuses_before_the_first_token_gives_the_stream_a_status(gateway, client):
    gateway.worker.refusal = InvalidRequest("no", field="seed")
    with pytest.raises(openai.BadRequestError) as wrong:
        await client.chat.completions.create(model=NAME, messages=MESSAGES, stream=True)
    assert wrong.value.param == "seed"


async def test_a_client_that_leaves_frees_the_worker(story_tokens):
    async with running(lambda submit: story_tokens[:-1] * 100) as gateway, RawClient.connect(gateway.port) as client:
        body = {"model": NAME, "messages": MESSAGES, "stream": True}
        await client.send(request_bytes("POST", "/v1/chat/completions", body))
        await client.head()
        client.writer.transport.abort()
        await until(lambda: gateway.worker.aborts, 5)


async def test_one_request_id_goes_all_the_way(gateway):
    async with RawClient.connect(gateway.port) as client:
        body = {"messages": MESSAGES}
        answer = await client.request("POST", "/v1/chat/completions", body, {"x-request-id": "trace-me"})
    assert answer.json["id"] == "chatcmpl-trace-me"
    assert gateway.router.places[0].request_id == "trace-me"
    assert gateway.worker.submits[0].request_id == "trace-me"


async def test_rest_and_grpc_give_the_same_text(gateway, client):
    rest = await client.chat.completions.create(model=NAME, messages=MESSAGES)
    async with grpc.aio.insecure_channel(gateway.config.grpc_listen) as channel:
        chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="Tell me a story.")])
        call = InferenceServiceStub(channel).Generate(pb.GenerateRequest(chat=chat), timeout=10)
        text = "".join([response.text async for response in call])
    assert text == rest.choices[0].message.content


async def test_it_is_ready_once_a_worker_is_known(story_tokens):
    async with running(lambda submit: story_tokens, ready=False) as gateway:
        async with asyncio.timeout(5):
            while True:
                with contextlib.suppress(OSError):
                    answer = await gateway.get("/ready")
                    break
                await asyncio.sleep(0.02)
        assert answer.status == 503
        assert NAME in answer.json["missing"][0]
        assert (await gateway.get("/health")).status == 200
        async with grpc.aio.insecure_channel(gateway.config.grpc_listen) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            assert (await check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.NOT_SERVING
            await gateway.router.set_models([MODEL])
            await gateway.wait_until_ready()

            async def serves():
                status = (await check(health_pb2.HealthCheckRequest())).status
                return status == health_pb2.HealthCheckResponse.SERVING

            await eventually(serves, "its health is SERVING")


async def test_a_stop_lets_streams_finish_and_takes_nothing_new(story_tokens):
    async with (
        running(lambda submit: story_tokens[:-1] * 3) as gateway,
        RawClient.connect(gateway.port) as busy,
        RawClient.connect(gateway.port) as idle,
    ):
        await busy.send(request_bytes("POST", "/v1/completions", {"prompt": "Hi", "stream": True, "max_tokens": 99}))
        assert (await busy.head())[0] == 200
        gateway.stop.set()
        assert await idle.closed()
        await until(lambda: not _listens(gateway.port))
        pieces = []
        while piece := await busy.chunk():
            pieces.append(piece)
        assert pieces[-1].endswith(b"data: [DONE]\n\n")
        async with asyncio.timeout(10):
            await gateway.service


def _listens(port):
    """Without a connection: asyncio leaves one open that it accepts as its server closes."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


async def test_ports_in_use_and_broken_model_folders_are_named(gateway, tmp_path):
    config = gateway.config
    with pytest.raises(Unavailable, match=str(gateway.port)):
        await serve(config, asyncio.Event())
    for model, word in ((str(tmp_path), "tokenizer.json"), ("/nowhere/at/all", "/nowhere/at/all")):
        with pytest.raises(InvalidRequest, match=word):
            await serve(GatewayConfig(model=model), asyncio.Event())
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidRequest, match=r"tokenizer\.json"):
        await serve(GatewayConfig(model=str(tmp_path)), asyncio.Event())


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"rest_listen": "8000"}, "rest_listen"),
        ({"grpc_listen": "host:99999"}, "grpc_listen"),
        ({"router": ()}, "router"),
        ({"router": ("nowhere",)}, "nowhere"),
        ({"rest_listen": "127.0.0.1:8001"}, "8001"),
    ],
)
def test_wrong_settings_are_named(settings, word):
    with pytest.raises(InvalidRequest, match=word):
        GatewayConfig(**settings).validate()


async def test_many_streams_at_once_over_real_router_and_simulated_workers(start_stack):
    stack = await asyncio.to_thread(start_stack, executor="sim", prefill_workers=1, decode_workers=2)
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as client:

        async def ask(number):
            stream = await client.chat.completions.create(
                model=NAME,
                messages=[{"role": "user", "content": f"A story about {number} dogs. " * (number % 4 * 10 + 1)}],
                max_tokens=40,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"ignore_eos": True},
            )
            return [chunk async for chunk in stream]

        answers = await asyncio.gather(*(ask(number) for number in range(64)))
    for chunks in answers:
        assert chunks[-1].usage.completion_tokens == 40
        assert chunks[-2].choices[0].finish_reason == "length"
