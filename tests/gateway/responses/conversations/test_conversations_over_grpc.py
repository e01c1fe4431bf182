"""Conversations over gRPC and REST with the same store."""

import grpc
import pytest
from support.gateway.responses_rig import HI, both_sides, create, item, refused
from support.gateway.rest_harness import say

from baton.v1 import conversation_pb2 as pb
from baton.v1 import response_pb2

CALL = item(function_call=response_pb2.ItemFunctionCall(call_id="a", name="f"))


async def begin(stub, *items, **fields):
    request = pb.CreateConversationRequest(items=items, **fields)
    return (await stub.CreateConversation(request, timeout=20)).conversation


async def items_of(stub, conversation_id, **fields):
    request = pb.ListConversationItemsRequest(
        conversation_id=conversation_id, order=response_pb2.ITEM_ORDER_OLDEST_FIRST, **fields
    )
    return await stub.ListConversationItems(request, timeout=20)


async def test_both_apis_see_one_conversation():
    async with both_sides(say("I am Baton.")) as (rest, stub):
        made = await begin(stub, item(message=response_pb2.ItemMessage(role="user", text="Hello")), metadata={"a": "b"})
        assert made.id.startswith("conv_")
        seen = (await rest.request("GET", f"/v1/conversations/{made.id}")).json
        assert (seen["metadata"], seen["created_at"]) == ({"a": "b"}, made.created_at_seconds)
        events = await create(stub, HI, conversation_id=made.id)
        assert events[-1].response.conversation_id == made.id
        listed = await items_of(stub, made.id)
        assert [one.message.text for one in listed.items] == ["Hello", HI.message.text, "I am Baton."]
        over_rest = (await rest.request("GET", f"/v1/conversations/{made.id}/items?order=asc")).json["data"]
        assert [one["id"] for one in over_rest] == [one.id for one in listed.items]
        page = await items_of(stub, made.id, limit=1, after=listed.items[0].id)
        assert (page.items[0].id, page.has_more) == (listed.items[1].id, True)


async def test_items_and_metadata_change():
    async with both_sides() as (_, stub):
        made = await begin(stub)
        request = pb.AddConversationItemsRequest(conversation_id=made.id, items=[HI, CALL])
        added = (await stub.AddConversationItems(request, timeout=20)).items
        assert [one.WhichOneof("item") for one in added] == ["message", "function_call"]
        named = {"conversation_id": made.id, "item_id": added[1].id}
        found = (await stub.GetConversationItem(pb.GetConversationItemRequest(**named), timeout=20)).item
        assert found == added[1]
        left = await stub.DeleteConversationItem(pb.DeleteConversationItemRequest(**named), timeout=20)
        assert left.conversation == made
        assert len((await items_of(stub, made.id)).items) == 1
        update = pb.UpdateConversationRequest(conversation_id=made.id, metadata={"x": "y"})
        assert (await stub.UpdateConversation(update, timeout=20)).conversation.metadata == {"x": "y"}
        await stub.DeleteConversation(pb.DeleteConversationRequest(conversation_id=made.id), timeout=20)
        with refused(grpc.StatusCode.NOT_FOUND, "conversation_id"):
            await stub.GetConversation(pb.GetConversationRequest(conversation_id=made.id), timeout=20)


@pytest.mark.parametrize(
    ("name", "fields", "code", "field"),
    [
        ("GetConversation", {}, "INVALID_ARGUMENT", "conversation_id"),
        ("GetConversation", {"conversation_id": "conv_x"}, "NOT_FOUND", "conversation_id"),
        ("UpdateConversation", {"conversation_id": "conv_x"}, "NOT_FOUND", "conversation_id"),
        ("DeleteConversation", {"conversation_id": "conv_x"}, "NOT_FOUND", "conversation_id"),
        ("ListConversationItems", {"conversation_id": "conv_x"}, "NOT_FOUND", "conversation_id"),
        ("AddConversationItems", {"conversation_id": "conv_x", "items": [HI]}, "NOT_FOUND", "conversation_id"),
        ("AddConversationItems", {"conversation_id": "conv_x"}, "INVALID_ARGUMENT", "items"),
        ("GetConversationItem", {"conversation_id": "conv_x"}, "INVALID_ARGUMENT", "item_id"),
        ("DeleteConversationItem", {"conversation_id": "conv_x", "item_id": "i"}, "NOT_FOUND", "conversation_id"),
        ("CreateConversation", {"items": [item()]}, "INVALID_ARGUMENT", "items.0"),
        ("CreateConversation", {"items": [HI] * 21}, "INVALID_ARGUMENT", "items"),
        (
            "CreateConversation",
            {"items": [item(message=response_pb2.ItemMessage(role="robot"))]},
            "INVALID_ARGUMENT",
            "items.0.message.role",
        ),
        ("CreateConversation", {"items": [item(id="x", message=HI.message)] * 2}, "INVALID_ARGUMENT", "items.1.id"),
        ("CreateConversation", {"metadata": {str(n): "" for n in range(17)}}, "INVALID_ARGUMENT", "metadata"),
    ],
)
async def test_a_wrong_call_is_refused_by_name(name, fields, code, field):
    async with both_sides() as (_, stub):
        with refused(getattr(grpc.StatusCode, code), field):
            await getattr(stub, name)(getattr(pb, f"{name}Request")(**fields), timeout=20)


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ({"conversation_id": "conv_x"}, "NOT_FOUND", "conversation_id"),
        ({"conversation_id": "c", "previous_response_id": "r"}, "INVALID_ARGUMENT", "previous_response_id"),
    ],
)
async def test_a_response_names_the_conversation_that_it_cannot_continue(fields, code, field):
    async with both_sides() as (_, stub):
        with refused(getattr(grpc.StatusCode, code), field):
            await create(stub, HI, **fields)
