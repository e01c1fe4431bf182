"""Pages of items in the lists of the Responses and Conversations APIs. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

from baton.gateway.responses.items import Item
from baton.gateway.responses.types import ItemList
from baton.rpc.errors import InvalidRequest

MAX_PAGE = 100
DEFAULT_PAGE = 20


def page_of(items: Sequence[Item], limit: int, order: str, after: str) -> ItemList:
    """Returns a page of items, which are given oldest first. Raises InvalidRequest."""
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"order is {order!r}; give asc or desc", field="order")
    ordered = list(items) if order == "asc" else list(reversed(items))
    if after:
        ids = [item["id"] for item in ordered]
        if after not in ids:
            raise InvalidRequest(f"after is {after!r}, which is not one of the items", field="after")
        ordered = ordered[ids.index(after) + 1 :]
    return listed(ordered[:limit], has_more=len(ordered) > limit)


def listed(items: Sequence[Item], has_more: bool = False) -> ItemList:
    """Returns items as a list object."""
    return ItemList(
        data=list(items),
        first_id=items[0]["id"] if items else None,
        last_id=items[-1]["id"] if items else None,
        has_more=has_more,
    )
