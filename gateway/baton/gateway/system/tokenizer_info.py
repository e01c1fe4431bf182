"""GET /tokenizer_info: what a client needs to tokenize as this gateway does. Served on the operator's wish only."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from baton.gateway.http.exchange import Exchange
from baton.gateway.models.served import ModelCatalog
from baton.gateway.models.tokenizer_archive import info_of
from baton.gateway.rest.query import last_value
from baton.gateway.rest.routing import Parameter, Route
from baton.gateway.serving.tenancy import allowed_model

_MODEL = Parameter("model", "Default: the only served model.", {"type": "string"})


class TokenizerInfo(Struct, kw_only=True):
    """The content of the model's tokenizer_config.json; these are always there."""

    tokenizer_class: str
    chat_template: str | None = None


def tokenizer_info_routes(catalog: ModelCatalog) -> list[Route]:
    """Returns the route."""

    def handle(exchange: Exchange) -> None:
        model = allowed_model(catalog, exchange.identity, last_value(exchange.query, "model"))
        info: dict[str, Any] = info_of(model.files)
        exchange.respond(200, msgspec.json.encode(info))

    summary = "Returns the tokenizer's configuration, with the chat template."
    return [Route("GET", "/tokenizer_info", handle, summary, None, TokenizerInfo, errors=(404,), parameters=(_MODEL,))]
