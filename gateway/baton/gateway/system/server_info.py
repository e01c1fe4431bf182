"""GET /server_info: the gateway's settings, models and software, for keys with the admin scope."""

from __future__ import annotations

import dataclasses
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from typing import Any
from urllib.parse import parse_qs

import msgspec
from msgspec import Struct

from baton.gateway.access.admin_check import AdminCheck
from baton.gateway.access.identity import Scope
from baton.gateway.config import GatewayConfig
from baton.gateway.http.exchange import Exchange
from baton.gateway.models.served import ServedModel
from baton.gateway.rest.routing import Parameter, Route
from baton.gateway.serving.context import ServingContext
from baton.gateway.version import VERSION
from baton.rpc.errors import InvalidRequest

_FORMATS = ("text", "json")
_FORMAT = Parameter("config_format", "The form of vllm_config.", {"enum": list(_FORMATS), "default": "text"})
_PACKAGES = ("grpcio", "protobuf", "tokenizers", "msgspec", "orjson", "jinja2", "uvloop", "redis")
_CREDENTIALS = re.compile(r"(?<=//)[^/@\s]*@")


class ModelFacts(Struct, kw_only=True):
    """A served model."""

    names: list[str]
    path: str
    max_model_len: int | None  # None: no worker has reported yet
    digest: str | None  # hexadecimal


class ServerInfo(Struct, kw_only=True):
    """The gateway. vllm_config has vLLM's name, and the gateway's settings: passwords in URLs are left out."""

    version: str
    vllm_config: str | dict[str, Any]
    models: list[ModelFacts]
    system_env: dict[str, str | None]  # versions; null: not installed


def server_info_routes(serving: ServingContext) -> list[Route]:
    """Returns the route."""
    access = AdminCheck(serving.gate, serving.config.rest_listen)

    def handle(exchange: Exchange) -> None:
        access.check_place(exchange.headers)
        form = parse_qs(exchange.query, keep_blank_values=True).get("config_format", ["text"])[-1]
        if form not in _FORMATS:
            raise InvalidRequest(f"config_format is {form!r}; give one of {', '.join(_FORMATS)}", field="config_format")
        settings = settings_of(serving.config)
        info = ServerInfo(
            version=VERSION,
            vllm_config=settings if form == "json" else as_text(settings),
            models=[_facts_of(model) for model in serving.catalog.models()],
            system_env=_system(),
        )
        exchange.respond(200, msgspec.json.encode(info))

    return [
        Route(
            "GET",
            "/server_info",
            handle,
            "Returns the gateway's settings, models and software.",
            response=ServerInfo,
            errors=(400, 403),
            parameters=(_FORMAT,),
            scope=Scope.ADMIN,
        )
    ]


def settings_of(config: GatewayConfig) -> dict[str, Any]:
    """Returns the settings by name, without the credentials in URLs."""
    return {field.name: _without_credentials(getattr(config, field.name)) for field in dataclasses.fields(config)}


def as_text(settings: dict[str, Any]) -> str:
    """Returns the settings as one line."""
    return ", ".join(f"{name}={value!r}" for name, value in settings.items())


def _without_credentials(value: Any) -> Any:
    if isinstance(value, str):
        return _CREDENTIALS.sub("***@", value)
    return [_without_credentials(one) for one in value] if isinstance(value, tuple) else value


def _facts_of(model: ServedModel) -> ModelFacts:
    info = model.info
    return ModelFacts(
        names=list(model.names),
        path=str(model.files.folder),
        max_model_len=None if info is None else info.max_model_len,
        digest=None if info is None else info.digest.hex(),
    )


def _system() -> dict[str, str | None]:
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        **{name: _version_of(name) for name in _PACKAGES},
    }


def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
