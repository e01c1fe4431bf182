"""Requests of very many fields are refused before they are parsed."""

import random

import grpc
import pytest
from support.processes.loop_stalls import loop_stalls

from baton.rpc.channel import open_channel
from baton.rpc.server.field_count import MAX_FIELDS, TooManyFields, check_fields
from baton.rpc.server.server import RpcServer, Service
from baton.v1 import inference_pb2, inference_pb2_grpc

METHOD = "/baton.v1.InferenceService/Tokenize"
REQUEST = inference_pb2.TokenizeRequest
EMPTY_MESSAGES = b"\x0a\x00"


class Counting(inference_pb2_grpc.InferenceServiceServicer):
    async def Tokenize(self, request, context):  # noqa: N802
        return inference_pb2.TokenizeResponse(token_ids=[len(request.chat.messages), len(request.text)])


@pytest.fixture
async def channel():
    register = inference_pb2_grpc.add_InferenceServiceServicer_to_server
    service = Service("baton.v1.InferenceService", Counting(), register)
    async with RpcServer("127.0.0.1:0", [service], options={"grpc.max_receive_message_length": 32 << 20}) as server:
        channel = open_channel(f"127.0.0.1:{server.port}")
        yield channel
        await channel.close()


def varint(number):
    data = b""
    while number >= 128:
        data, number = data + bytes([number & 127 | 128]), number >> 7
    return data + bytes([number])


def chat_of(messages):
    """A TokenizeRequest's bytes with these bytes as its chat."""
    return b"\x12" + varint(len(messages)) + messages


def count(data):
    """The number of fields, by trying bounds."""
    low, high = 0, len(data)
    while low < high:
        middle = (low + high) // 2
        try:
            check_fields(data, REQUEST.DESCRIPTOR, middle)
            high = middle
        except TooManyFields:
            low = middle + 1
    return low


def fields_of(message):
    total = 0
    for field, value in message.ListFields():
        values = value if field.is_repeated else [value]
        total += len(values)
        if field.message_type is not None:
            total += sum(fields_of(one) for one in values)
    return total


@pytest.mark.parametrize("seed", range(20))
def test_fields_are_counted_as_a_parsed_message_has_them(seed):
    draw = random.Random(seed)
    request = REQUEST(model="m" * draw.randrange(300))
    for _ in range(draw.randrange(30)):
        message = request.chat.messages.add(role="user", content="é" * draw.randrange(200))
        for _ in range(draw.randrange(4)):
            message.tool_calls.add(id="7" * draw.randrange(3), name="f")
    assert count(request.SerializeToString()) == fields_of(request)


@pytest.mark.parametrize("seed", range(200))
def test_counting_ends_on_any_bytes(seed):
    draw = random.Random(seed)
    data = chat_of(EMPTY_MESSAGES * 40) if seed % 2 else bytes(200)
    data = bytes(draw.randrange(256) if draw.random() < 0.2 else byte for byte in data)
    check_fields(data, REQUEST.DESCRIPTOR, len(data))


async def test_millions_of_fields_are_refused_and_do_not_stall_the_server(channel):
    data = chat_of(EMPTY_MESSAGES * 8_000_000)
    async with loop_stalls() as stalls:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await channel.unary_unary(METHOD)(data, timeout=20)
    assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert f"more than {MAX_FIELDS} fields" in raised.value.details()
    assert stalls.longest < 0.05


async def test_large_requests_of_fewer_are_served(channel):
    for data, expected in (
        (REQUEST(text="a" * 16_000_000).SerializeToString(), [0, 16_000_000]),
        (chat_of(EMPTY_MESSAGES * (MAX_FIELDS - 1)), [MAX_FIELDS - 1, 0]),
    ):
        answer = await channel.unary_unary(METHOD)(data, timeout=20)
        assert list(inference_pb2.TokenizeResponse.FromString(answer).token_ids) == expected


async def test_a_large_request_that_cannot_be_decoded_is_an_error(channel):
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await channel.unary_unary(METHOD)(b"\x0a\xff" + b"\xff" * 100_000, timeout=5)
    assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "cannot be decoded" in raised.value.details()


def test_clients_send_no_streams_of_requests():
    """Their messages would be parsed uncounted."""
    service = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"]
    assert [method.name for method in service.methods if method.client_streaming] == []
