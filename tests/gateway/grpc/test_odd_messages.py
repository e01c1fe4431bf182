"""Messages of the public gRPC API with every field at odd values: each call succeeds or names the wrong field."""

import random

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from support.gateway.responses_rig import HI, both_sides
from support.gateway.rest_harness import say
from support.gateway.scripted_gateway import running
from support.gateway.vectors_rig import CLASSIFIES, EMBEDS, FakePooler
from support.gateway.vectors_rig import both_sides as vectors

from baton.v1 import conversation_pb2, response_pb2, vectors_pb2
from baton.v1 import inference_pb2 as pb
from baton.v1.inference_pb2_grpc import InferenceServiceStub

NUM_CALLS = 100
DEPTH = 5
TEXTS = (
    "",
    "x",
    "user",
    "assistant",
    "\0",
    "😀",
    '{"a":',
    "null",
    "{}",
    "[]",
    "{{ messages }}",
    "x" * 300,
    "a b",
    "root ::= 1",
)
FLOATS = (0.0, 0.5, 1.0, -1.0, 3.0, 1e30, float("nan"), float("inf"), float("-inf"))
INTEGERS = {
    FieldDescriptor.TYPE_UINT32: (0, 1, 3, 7, 2**31, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 1, 2**63, 2**64 - 1),
    FieldDescriptor.TYPE_INT32: (0, 1, -1, 2**31 - 1, -(2**31)),
    FieldDescriptor.TYPE_SINT32: (0, 1, -1, 2**31 - 1, -(2**31)),
    FieldDescriptor.TYPE_INT64: (0, 1, -1, 2**63 - 1, -(2**63)),
    FieldDescriptor.TYPE_SINT64: (0, 1, -1, 2**63 - 1, -(2**63)),
}
EOS = 4
# There is one model, and nothing to go on with; what is scripted is never likely enough to end beams.
SILENT = ("model", "previous_response_id", "conversation_id", "resume", "beam_search", "timeout_ms")


def odd_value(field, dice):
    if field.type in INTEGERS:
        return dice.choice(INTEGERS[field.type])
    if field.type in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE):
        return dice.choice(FLOATS)
    if field.type == FieldDescriptor.TYPE_BOOL:
        return dice.random() < 0.5
    if field.type == FieldDescriptor.TYPE_ENUM:
        return dice.choice((0, 1, 2, 3, 99))
    text = dice.choice(TEXTS)
    return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text


def fill(message, dice, depth=0):
    """Sets some of the fields, all the way down."""
    for field in message.DESCRIPTOR.fields:
        if field.name in SILENT or dice.random() > (0.4 if depth else 0.3):
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            fill_map(getattr(message, field.name), field.message_type, dice, depth)
        elif field.message_type is not None:
            if depth < DEPTH:
                inner = getattr(message, field.name)
                for _ in range(dice.randint(1, 3) if field.is_repeated else 1):
                    fill(inner.add() if field.is_repeated else inner, dice, depth + 1)
                if not field.is_repeated:
                    inner.SetInParent()
        elif field.is_repeated:
            getattr(message, field.name).extend(odd_value(field, dice) for _ in range(dice.randint(1, 4)))
        else:
            setattr(message, field.name, odd_value(field, dice))
    return message


def fill_map(entries, entry, dice, depth):
    value = entry.fields_by_name["value"]
    for _ in range(dice.randint(1, 3)):
        key = dice.choice(TEXTS)
        if value.message_type is None:
            entries[key] = odd_value(value, dice)
        elif depth < DEPTH:
            fill(entries[key], dice, depth + 1)


async def outcome(answers):
    try:
        async for _ in answers:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def code_of(call):
    return await call.code()


@pytest.mark.parametrize("kind", ["Generate", "CreateResponse"])
async def test_no_value_of_any_field_is_a_defect(kind):
    dice = random.Random(kind)
    seen = set()
    async with (
        running(lambda submit: [5, 6, 7, EOS]) as gateway,
        grpc.aio.insecure_channel(gateway.config.grpc_listen) as channel,
    ):
        call = getattr(InferenceServiceStub(channel), kind)
        for _ in range(NUM_CALLS):
            if kind == "Generate":
                request = pb.GenerateRequest(chat={"messages": [{"role": "user", "content": "Hi"}]})
            else:
                request = pb.CreateResponseRequest(input=[HI])
            code = await outcome(call(fill(request, dice), timeout=30))
            if code is grpc.StatusCode.NOT_FOUND and kind == "Generate":
                assert request.adapter
                continue
            assert code in (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT), request
            seen.add(code)
    assert len(seen) == 2


@pytest.mark.parametrize("kind", ["Embed", "Score", "Rerank", "Classify", "Pool"])
async def test_no_value_of_a_request_for_vectors_is_a_defect(kind):
    dice = random.Random(kind)
    seen = set()
    module = vectors_pb2 if kind in ("Score", "Rerank") else pb
    pools = CLASSIFIES if kind == "Classify" else EMBEDS
    async with vectors(FakePooler(pools.width), pools=pools) as (_, stub):
        for _ in range(NUM_CALLS):
            request = fill(getattr(module, f"{kind}Request")(), dice)
            call = getattr(stub, kind)(request, timeout=30)
            code = await (outcome(call) if kind in ("Embed", "Pool") else code_of(call))
            assert code in (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT), request
            seen.add(code)
    assert len(seen) == 2


async def test_no_id_is_a_defect():
    async with both_sides(say("x")) as (_, stub):
        for name in ("GetResponse", "CancelResponse", "DeleteResponse", "ListResponseInput", "WatchResponse"):
            for text in TEXTS:
                request = getattr(response_pb2, f"{name}Request")(response_id=text)
                call = getattr(stub, name)(request, timeout=30)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    _ = [answer async for answer in call] if name == "WatchResponse" else await call
                expected = grpc.StatusCode.NOT_FOUND if text else grpc.StatusCode.INVALID_ARGUMENT
                assert caught.value.code() is expected, (name, text)
        for name in ("GetConversation", "UpdateConversation", "DeleteConversation", "ListConversationItems"):
            for text in TEXTS:
                request = getattr(conversation_pb2, f"{name}Request")(conversation_id=text)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await getattr(stub, name)(request, timeout=30)
                expected = grpc.StatusCode.NOT_FOUND if text else grpc.StatusCode.INVALID_ARGUMENT
                assert caught.value.code() is expected, (name, text)
