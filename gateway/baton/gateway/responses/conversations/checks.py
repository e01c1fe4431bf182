"""Checks shared by the REST and gRPC APIs of conversations."""

from __future__ import annotations

from collections.abc import Sequence

from baton.gateway.responses.conversations.store import MAX_ITEMS_OF_REQUEST
from baton.gateway.responses.items import Item, input_items
from baton.rpc.errors import InvalidRequest


def checked_items(items: Sequence[Item]) -> list[Item]:
    """Returns a request's items, each with an id. Raises InvalidRequest that names the item."""
    if len(items) > MAX_ITEMS_OF_REQUEST:
        message = f"items has {len(items)} items; at most {MAX_ITEMS_OF_REQUEST} are allowed"
        raise InvalidRequest(message, field="items")
    return input_items(items, "items")
