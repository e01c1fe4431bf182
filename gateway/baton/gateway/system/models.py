"""GET /v1/models and /v1/models/{model}: every name that a tenant may use, in OpenAI's or Anthropic's form."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from hashlib import blake2b
from urllib.parse import parse_qs, unquote

import msgspec

from baton.gateway.anthropic.request import check_version
from baton.gateway.anthropic.routes import BETA, VERSION
from baton.gateway.errors.anthropic import asks_for_anthropic
from baton.gateway.http.exchange import Exchange
from baton.gateway.models.served import ModelCatalog, ServedModel
from baton.gateway.models.tasks import task_names
from baton.gateway.rest.routing import Parameter, Route
from baton.gateway.schemas import answers
from baton.gateway.schemas.answers import ModelCard, ModelList, ModelPermission
from baton.gateway.serving.tenancy import allowed_model, allowed_models
from baton.gateway.system.anthropic_models import PARAMETERS, AnthropicModel, AnthropicModelList, page_of
from baton.rpc.errors import InvalidRequest

PATH = "/v1/models"

# Codex adds it to every list request.
_CLIENT_VERSION = Parameter("client_version", "Accepted and ignored.", {"type": "string"})


class Models:
    """Handles the routes of models."""

    def __init__(self, catalog: ModelCatalog) -> None:
        self._catalog = catalog
        self._created = int(time.time())

    def list(self, exchange: Exchange) -> None:
        """Handles GET /v1/models."""
        models = _served(allowed_models(self._catalog, exchange.identity))
        named = [(name, model) for model in models for name in model.names]
        query = parse_qs(exchange.query)
        if asks_for_anthropic(exchange.path, exchange.headers):
            check_version(exchange.headers)
            _respond(exchange, page_of([self._anthropic(name, model) for name, model in named], query))
            return
        for parameter in PARAMETERS:
            if parameter.name in query:
                raise InvalidRequest(
                    f"{parameter.name} belongs to Anthropic's form of this list; send anthropic-version with it",
                    field=parameter.name,
                )
        _respond(exchange, ModelList([self._card(name, model) for name, model in named]))

    def get(self, exchange: Exchange) -> None:
        """Handles GET /v1/models/{model}, by any of the model's names."""
        name = unquote(exchange.path.removeprefix(f"{PATH}/"))
        model = allowed_model(self._catalog, exchange.identity, name)
        model.require_info()
        if asks_for_anthropic(exchange.path, exchange.headers):
            check_version(exchange.headers)
            _respond(exchange, self._anthropic(name, model))
        else:
            _respond(exchange, self._card(name, model))

    def _card(self, name: str, model: ServedModel) -> ModelCard:
        return ModelCard(
            id=name,
            created=self._created,
            root=model.name if model.adapter is None else model.adapter.path,
            parent=None if model.adapter is None else model.base_name,
            permission=[ModelPermission(id=_permission_id(name), created=self._created)],
            max_model_len=_max_model_len(model),
            tool_call_parser=model.output_format.tools_choice.name,
            reasoning_parser=model.output_format.reasoning_choice.name,
            tasks=[] if model.info is None else task_names(model.info),
        )

    def _anthropic(self, name: str, model: ServedModel) -> AnthropicModel:
        created = datetime.fromtimestamp(self._created, UTC).isoformat().replace("+00:00", "Z")
        length = _max_model_len(model)
        return AnthropicModel(
            id=name, display_name=name, created_at=created, max_input_tokens=length, max_tokens=length
        )


def model_routes(catalog: ModelCatalog) -> list[Route]:
    """Returns the routes of models."""
    models = Models(catalog)
    return [
        Route(
            "GET",
            PATH,
            models.list,
            "Lists the models under every name, from the first report of a worker on, before which it responds 503; "
            "with Anthropic-Version in Anthropic's form.",
            response=answers.ModelList,
            anthropic=AnthropicModelList,
            parameters=(VERSION, BETA, _CLIENT_VERSION, *PARAMETERS),
        ),
        Route(
            "GET",
            f"{PATH}/{{model}}",
            models.get,
            "Returns a model by any of its names; with Anthropic-Version in Anthropic's form.",
            response=answers.ModelCard,
            anthropic=AnthropicModel,
            errors=(404,),
            parameters=(VERSION, BETA),
            ids=".*[^/]",
        ),
    ]


def _served(models: Sequence[ServedModel]) -> list[ServedModel]:
    """Returns the models that workers have served. Raises Unavailable if all wait for their first worker."""
    served = [model for model in models if model.info is not None]
    if models and not served:
        models[0].require_info()
    return served


def _permission_id(name: str) -> str:
    """Returns an id that is the same at every gateway."""
    return f"modelperm-{blake2b(name.encode(), digest_size=16).hexdigest()}"


def _max_model_len(model: ServedModel) -> int | None:
    return model.info.max_model_len if model.info is not None else None


def _respond(exchange: Exchange, answer: msgspec.Struct) -> None:
    exchange.respond(200, msgspec.json.encode(answer))
