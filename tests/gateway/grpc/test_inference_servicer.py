"""The public gRPC API over a scripted fleet, called by a real client."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import pytest
from grpc_status import rpc_status
from support.gateway.scripted_services import ScriptedRouter, ScriptedWorker, until

from baton.gateway.generation.generator import WorkerGenerator
from baton.gateway.generation.workers.stream_pool import WorkerStreams
from baton.gateway.grpc.servicer import InferenceServicer
from baton.gateway.metrics.counters import GenerationCounters
from baton.gateway.models.served import ModelCatalog, load_served_model
from baton.gateway.routers.client import RouterClient, RouterTimes
from baton.rpc.channel import open_channel
from baton.rpc.errors import NoCapacity
from baton.rpc.server.server import RpcServer, Service
from baton.v1 import inference_pb2, inference_pb2_grpc, types_pb2

SAMPLE = Path(__file__).parents[3] / "models" / "storyteller-7m"
STORY = "Once upon a time there was a 😀 girl."
EOS = 4
CHAT = inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage(role="user", content="Tell me a story")])


@pytest.fixture(scope="module")
def model():
    return load_served_model(str(SAMPLE))


@pytest.fixture
async def fleet(model):
    story = model.tokenizer.encode(STORY, add_special_tokens=False)
    counters = GenerationCounters()
    catalog = ModelCatalog([model])
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(ScriptedWorker("w0", lambda submit: [*story, EOS]))
        router = await stack.enter_async_context(ScriptedRouter([worker]))
        times = RouterTimes(total=1.0, no_worker=0.2, first_delay=0.02)
        client = await stack.enter_async_context(RouterClient([router.address], catalog.update, counters, times))
        streams = await stack.enter_async_context(WorkerStreams(counters))
        await until(lambda: catalog.ready)
        servicer = InferenceServicer(WorkerGenerator(catalog, client, streams, counters), catalog)
        register = inference_pb2_grpc.add_InferenceServiceServicer_to_server
        service = Service("baton.v1.InferenceService", servicer, register)
        server = await stack.enter_async_context(RpcServer("127.0.0.1:0", [service], grace_seconds=0))
        channel = open_channel(f"127.0.0.1:{server.port}")
        stack.push_async_callback(channel.close)
        yield worker, router, inference_pb2_grpc.InferenceServiceStub(channel)


async def collect(stub, **fields):
    return [response async for response in stub.Generate(inference_pb2.GenerateRequest(**fields), timeout=10)]


def text_of(responses, index=0):
    return "".join(response.text for response in responses if response.index == index)


@pytest.mark.parametrize(
    "prompt",
    [
        {"chat": CHAT},
        {"text": "Tell me"},
        {"token_ids": inference_pb2.TokenIds(token_ids=[10, 11, 12])},
    ],
    ids=["chat", "text", "token_ids"],
)
async def test_every_kind_of_prompt_streams_an_answer(fleet, prompt):
    _, _, stub = fleet
    responses = await collect(stub, request_id="mine", **prompt)
    assert text_of(responses) == STORY
    assert {response.request_id for response in responses} == {"mine"}
    assert [response.finish_reason for response in responses if response.finish_reason] == [
        types_pb2.FINISH_REASON_STOP
    ]
    assert responses[-1].usage.completion_tokens == sum(len(response.token_ids) for response in responses)
    assert not any(response.HasField("usage") for response in responses[:-1])


async def test_prompts_are_tokenized_as_the_model_requires(fleet, model):
    worker, _, stub = fleet
    await collect(stub, chat=CHAT)
    await collect(stub, text="Tell me")
    chat, text = ([*submit.prompt_token_ids] for submit in worker.submits)
    assert model.tokenizer.decode(chat) == "<|bos|><|im_start|>user\nTell me a story<|im_end|>\n<|im_start|>assistant\n"
    assert text == model.tokenizer.encode("Tell me", add_special_tokens=True)
    going_on = inference_pb2.ChatPrompt(
        messages=[*CHAT.messages, inference_pb2.ChatMessage(role="assistant", content="Once")],
        continue_final_message=True,
    )
    await collect(stub, chat=going_on)
    assert model.tokenizer.decode(worker.submits[-1].prompt_token_ids).endswith("<|im_start|>assistant\nOnce")


async def test_choices_logprobs_and_stop_reasons_are_carried(fleet):
    _, _, stub = fleet
    responses = await collect(stub, chat=CHAT, n=2, sampling={"logprobs": 1}, stop={"stop": ["girl"]})
    for index in range(2):
        mine = [response for response in responses if response.index == index and not response.HasField("usage")]
        assert text_of(mine, index) == STORY[: STORY.index("girl")]
        assert mine[-1].stop_string == "girl"
        assert all(len(response.logprobs) == len(response.token_ids) for response in mine)
        assert mine[0].logprobs[0].rank == 1


async def test_skip_detokenize_sends_only_token_ids(fleet):
    _, _, stub = fleet
    responses = await collect(stub, chat=CHAT, skip_detokenize=True)
    assert text_of(responses) == ""
    assert sum(len(response.token_ids) for response in responses) > 5


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ({"chat": CHAT, "model": "x"}, grpc.StatusCode.NOT_FOUND, "model"),
        ({}, grpc.StatusCode.INVALID_ARGUMENT, "prompt"),
        ({"chat": inference_pb2.ChatPrompt()}, grpc.StatusCode.INVALID_ARGUMENT, "chat.messages"),
        (
            {"chat": inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage(content="x")])},
            grpc.StatusCode.INVALID_ARGUMENT,
            "chat.messages.0.role",
        ),
        ({"token_ids": inference_pb2.TokenIds()}, grpc.StatusCode.INVALID_ARGUMENT, "prompt"),
        ({"chat": CHAT, "sampling": {"temperature": 9}}, grpc.StatusCode.INVALID_ARGUMENT, "sampling.temperature"),
        ({"chat": CHAT, "stop": {"max_tokens": 0}}, grpc.StatusCode.INVALID_ARGUMENT, "stop.max_tokens"),
        (
            {"chat": CHAT, "skip_detokenize": True, "stop": {"stop": ["x"]}},
            grpc.StatusCode.INVALID_ARGUMENT,
            "stop.stop",
        ),
        ({"chat": CHAT, "request_id": "x" * 999}, grpc.StatusCode.INVALID_ARGUMENT, "request_id"),
    ],
)
async def test_a_bad_request_names_the_field(fleet, fields, code, field):
    _, _, stub = fleet
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(stub, **fields)
    assert caught.value.code() == code
    detail = types_pb2.ErrorDetail()
    rpc_status.from_call(caught.value).details[0].Unpack(detail)
    assert detail.field == field


async def test_overload_carries_a_retry_time(fleet):
    _, router, stub = fleet
    router.refusal = NoCapacity("all full", retry_after_ms=250)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(stub, chat=CHAT)
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    detail = types_pb2.ErrorDetail()
    rpc_status.from_call(caught.value).details[0].Unpack(detail)
    assert detail.retry_after_ms == 250


async def test_cancelling_the_call_aborts_on_the_worker(fleet):
    worker, _, stub = fleet
    worker.step_seconds = 0.05
    call = stub.Generate(inference_pb2.GenerateRequest(chat=CHAT))
    await call.read()
    call.cancel()
    await until(lambda: worker.aborts == [0])


async def test_a_client_that_does_not_read_loses_nothing(fleet, model):
    worker, _, stub = fleet
    token_ids = model.tokenizer.encode(STORY, add_special_tokens=False)
    worker.script = lambda submit: token_ids * 40
    worker.step_seconds = 0
    stop = {"ignore_eos": True, "max_tokens": 2000}
    call = stub.Generate(inference_pb2.GenerateRequest(chat=CHAT, stop=stop))
    await asyncio.sleep(0.5)
    responses = [response async for response in call]
    assert text_of(responses) == STORY * 40


async def test_tokenize_detokenize_and_models(fleet, model):
    _, _, stub = fleet
    tokenized = await stub.Tokenize(inference_pb2.TokenizeRequest(text="Tell me"))
    assert tokenized.max_model_len == 2048
    assert list(tokenized.token_ids) == model.tokenizer.encode("Tell me", add_special_tokens=True)
    text = await stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=tokenized.token_ids))
    assert text.text == "<|bos|>Tell me"
    chat = await stub.Tokenize(inference_pb2.TokenizeRequest(chat=CHAT))
    assert model.tokenizer.decode(chat.token_ids).endswith("<|im_start|>assistant\n")
    (listed,) = (await stub.ListModels(inference_pb2.ListModelsRequest())).models
    assert (listed.name, listed.block_size) == ("storyteller-7m", 16)


@pytest.mark.parametrize("request_id", ["a\nb", "a b", "ü", "x" * 257])
async def test_a_request_id_that_logs_could_not_carry_is_refused(fleet, request_id):
    _, _, stub = fleet
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await collect(stub, text="Hi", request_id=request_id)
    assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "request_id" in raised.value.details()


async def test_a_chat_of_more_messages_than_the_context_has_tokens_is_refused(fleet):
    _, _, stub = fleet
    chat = inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage(role="user")] * 100_000)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await collect(stub, chat=chat)
    assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "messages" in raised.value.details()
