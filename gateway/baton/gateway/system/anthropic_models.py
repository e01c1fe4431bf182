"""Models in the form of Anthropic's API: pages of named models with a date."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec import Struct

from baton.gateway.rest.routing import Parameter
from baton.rpc.errors import InvalidRequest

_MAX_PAGE = 1000
_DEFAULT_PAGE = 20
_LIFECYCLES = ("active", "deprecated", "retired")

PARAMETERS = (
    Parameter(
        "limit",
        "Models per page.",
        {"type": "integer", "minimum": 1, "maximum": _MAX_PAGE, "default": _DEFAULT_PAGE},
    ),
    Parameter("after_id", "The model before the page.", {"type": "string"}),
    Parameter("before_id", "The model behind the page.", {"type": "string"}),
    Parameter("lifecycle", "Only models in these states; all are active.", {"enum": list(_LIFECYCLES)}, nested=True),
)


class AnthropicModel(Struct, kw_only=True):
    """A served model in Anthropic's form."""

    type: Literal["model"] = "model"
    id: str
    display_name: str
    created_at: str  # RFC 3339; the start of this gateway
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int | None
    max_tokens: int | None


class AnthropicModelList(Struct, kw_only=True):
    """A page of models in Anthropic's form."""

    data: list[AnthropicModel]
    has_more: bool
    first_id: str | None
    last_id: str | None


def page_of(models: Sequence[AnthropicModel], query: Mapping[str, list[str]]) -> AnthropicModelList:
    """Returns the requested page. Raises InvalidRequest."""
    limit = _limit(query)
    after, before = (query.get(name, [""])[-1] for name in ("after_id", "before_id"))
    if after and before:
        raise InvalidRequest("give either after_id or before_id", field="before_id")
    found = list(models) if _asks_for_active(query) else []
    if after:
        found = found[_index(models, after, "after_id") + 1 :]
    if before:
        found = found[: _index(models, before, "before_id")]
    page = found[-limit:] if before else found[:limit]
    return AnthropicModelList(
        data=page,
        has_more=len(found) > limit,
        first_id=page[0].id if page else None,
        last_id=page[-1].id if page else None,
    )


def _limit(query: Mapping[str, list[str]]) -> int:
    text = query.get("limit", [str(_DEFAULT_PAGE)])[-1]
    if not text.isascii() or not text.isdigit() or len(text) > 4 or not 1 <= int(text) <= _MAX_PAGE:
        raise InvalidRequest(f"limit is {text[:40]!r}; it must be a number from 1 to {_MAX_PAGE}", field="limit")
    return int(text)


def _asks_for_active(query: Mapping[str, list[str]]) -> bool:
    asked = [word for name, words in query.items() if name.partition("[")[0] == "lifecycle" for word in words]
    for word in asked:
        if word not in _LIFECYCLES:
            raise InvalidRequest(f"lifecycle is {word[:40]!r}; give one of {', '.join(_LIFECYCLES)}", field="lifecycle")
    return not asked or "active" in asked


def _index(models: Sequence[AnthropicModel], name: str, field: str) -> int:
    for index, model in enumerate(models):
        if model.id == name:
            return index
    raise InvalidRequest(f"{field} is {name[:80]!r}, which is not one of the models", field=field)
