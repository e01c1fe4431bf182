"""Request and response bodies of POST /generative_scoring, as vLLM has them. Null means unset."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from baton.gateway.schemas.pooling import PoolingUsage, Score
from baton.gateway.schemas.requests import PrintableId, Salt, TokenId


class GenerativeScoringRequest(Struct, kw_only=True):
    """POST /generative_scoring: each item joined to the query is a prompt, scored by its next token."""

    model: str | None = None  # null: the only served model
    query: str | list[TokenId]
    items: Annotated[list[str | list[TokenId]], Meta(min_length=1)]
    # The score of an item is the probability of the first of these tokens.
    label_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=128)]
    apply_softmax: bool | None = None  # null: true, the probability among the labels; false: among all tokens
    item_first: bool | None = None  # null: false. The item is before the query
    add_special_tokens: bool | None = None  # null: true
    user: str | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None  # lower runs earlier
    cache_salt: Salt | None = None
    request_id: PrintableId | None = None


class GenerativeScoringResponse(Struct, kw_only=True):
    """The scores of all items, in order."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: PoolingUsage
