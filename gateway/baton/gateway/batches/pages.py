"""Pages of files and batches: the query, and the records after an id. Knows no record's content."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import parse_qs

from baton.gateway.batches.records import Unreadable
from baton.gateway.batches.state.store import StateStore
from baton.rpc.errors import InvalidRequest

T = TypeVar("T")

_log = logging.getLogger(__name__)

_READ_AT_ONCE = 200


@dataclass(frozen=True, slots=True)
class PageQuery:
    """The query parameters of a list."""

    limit: int
    after: str = ""
    ascending: bool = False
    purpose: str = ""  # empty: every one


def page_query(query: str, default_limit: int, max_limit: int) -> PageQuery:
    """Parses a query. Raises InvalidRequest."""
    values = {name: found[-1] for name, found in parse_qs(query, keep_blank_values=True).items()}
    limit, order = values.get("limit", str(default_limit)), values.get("order", "desc")
    if not (limit.isascii() and limit.isdigit() and len(limit) < 7 and 1 <= int(limit) <= max_limit):
        raise InvalidRequest(f"limit is {limit[:40]!r}; it must be a number from 1 to {max_limit}", field="limit")
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"order is {order[:40]!r}; give asc or desc", field="order")
    return PageQuery(int(limit), values.get("after", ""), order == "asc", values.get("purpose", ""))


async def read_page(
    state: StateStore, kind: str, tenant: str, query: PageQuery, decode: Callable[[bytes], T | None]
) -> tuple[list[T], bool]:
    """Returns a page of decoded records and whether more follow. `decode` returns None for records to leave out, and
    raises Unreadable, which leaves them out too.

    Raises InvalidRequest for an unknown `after`.
    """
    found: list[T] = []
    after = query.after
    while True:
        names = await state.page(kind, tenant, after, _READ_AT_ONCE, query.ascending)
        if names is None:
            if after == query.after:
                raise InvalidRequest(f"after is {after[:80]!r}, which is not in the list", field="after")
            return found, False  # deleted in the meantime
        records = await state.load(kind, names)
        found += _decoded(zip(names, records, strict=True), decode)
        if len(found) > query.limit or len(names) < _READ_AT_ONCE:
            return found[: query.limit], len(found) > query.limit
        after = names[-1]


def _decoded(records: Iterable[tuple[str, bytes | None]], decode: Callable[[bytes], T | None]) -> Iterator[T]:
    for name, record in records:
        try:
            one = None if record is None else decode(record)
        except Unreadable as error:
            _log.error("%s is not listed: %s", name, error.message)
            continue
        if one is not None:
            yield one
