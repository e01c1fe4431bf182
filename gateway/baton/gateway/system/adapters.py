"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, with vLLM's bodies and answers, for the scope admin."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Coroutine

import grpc
from msgspec import Struct

from baton.gateway.access.admin_check import AdminCheck
from baton.gateway.access.identity import Identity, Scope
from baton.gateway.bodies.decoder import BodyDecoder
from baton.gateway.http.exchange import Exchange
from baton.gateway.models.served import ModelCatalog, ServedModel
from baton.gateway.rest.routing import Route
from baton.gateway.routers.fleet_control import FleetControl
from baton.gateway.serving.context import ServingContext
from baton.rpc.errors import InvalidRequest, NotFound, PermissionDenied, ServiceError
from baton.v1 import control_pb2 as pb
from baton.v1 import types_pb2

_log = logging.getLogger(__name__)

_LOAD_SECONDS = 660.0
_RESOLVE_SECONDS = 60.0
_UNLOAD_SECONDS = 30.0
_ERRORS = (400, 403, 404, 408, 409, 413, 501, 503, 504)


class LoadAdapterBody(Struct, kw_only=True):
    """POST /v1/load_lora_adapter."""

    lora_name: str
    lora_path: str  # a folder on the workers
    load_inplace: bool = False  # replaces an adapter of the same name
    pinned: bool = False  # kept on the workers' devices, without requests too
    base_model_name: str | None = None  # None: the only served model


class UnloadAdapterBody(Struct, kw_only=True):
    """POST /v1/unload_lora_adapter."""

    lora_name: str


class AdapterService:
    """Loads and unloads adapters on all workers of a model."""

    def __init__(self, catalog: ModelCatalog, fleet: FleetControl) -> None:
        self._catalog = catalog
        self._fleet = fleet

    async def load(
        self,
        identity: Identity,
        name: str,
        path: str,
        model_name: str = "",
        *,
        replace: bool = False,
        pinned: bool = False,
    ) -> None:
        """Loads an adapter. Raises a ServiceError that names the field; then it is loaded nowhere."""
        if not name or not path:
            missing = "lora_name" if not name else "lora_path"
            raise InvalidRequest("Both 'lora_name' and 'lora_path' must be provided.", field=missing)
        _check_tenant(identity, name)
        model = self._base(model_name)
        known = self._find(name)
        if known is not None and known.adapter is None:
            raise InvalidRequest(f"lora_name: {name!r} is the name of a model; choose another one", field="lora_name")
        if known is not None and not replace:
            raise InvalidRequest(
                f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
                "'load_inplace' to True.",
                field="lora_name",
            )
        request = pb.LoadAdapterRequest(
            name=name, path=path, replace=replace, registered_ms=round(time.time() * 1000), pinned=pinned
        )
        await self._load(request, model, known, _LOAD_SECONDS)

    async def resolve(self, name: str, model: ServedModel) -> None:
        """Loads the adapter that workers find by its name. Raises NotFound without one, and as `load`."""
        request = pb.LoadAdapterRequest(name=name, resolve=True, registered_ms=round(time.time() * 1000))
        await self._load(request, model, None, _RESOLVE_SECONDS)

    async def _load(
        self, request: pb.LoadAdapterRequest, model: ServedModel, known: ServedModel | None, seconds: float
    ) -> None:
        name = request.name
        try:
            answers = await self._fleet.ask_all((), lambda stub: stub.LoadAdapter(request, timeout=seconds))
        except ServiceError:
            await self._undo(name, known)
            raise
        adapters = [answer.adapter for answer in answers.values()]
        if len({adapter.digest for adapter in adapters}) > 1:
            await self._undo(name, known)
            digests = ", ".join(f"{worker}: {answer.adapter.digest.hex()}" for worker, answer in answers.items())
            raise InvalidRequest(
                f"lora_path: workers have other files at {adapters[0].path} ({digests})", field="lora_path"
            )
        self._catalog.add_adapter(model.name, adapters[0])
        _log.info("adapter loaded on %d workers: %s", len(answers), name)

    async def unload(self, identity: Identity, name: str) -> None:
        """Unloads an adapter. Raises NotFound without it, PermissionDenied for one of another tenant."""
        _check_tenant(identity, name)
        known = self._find(name) if name else None
        if known is None or known.adapter is None:
            raise NotFound(f"The lora adapter '{name}' cannot be found.", field="lora_name")
        await self._unload(name)
        self._catalog.remove_adapter(name)

    async def _unload(self, name: str) -> None:
        request = pb.UnloadAdapterRequest(name=name)

        async def call(stub: object) -> object:
            try:
                return await stub.UnloadAdapter(request, timeout=_UNLOAD_SECONDS)  # type: ignore[attr-defined]
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.NOT_FOUND:  # a worker that has started since
                    return pb.UnloadAdapterResponse()
                raise

        await self._fleet.ask_all((), call)

    async def _undo(self, name: str, known: ServedModel | None) -> None:
        """Restores what workers served before a load that some of them refused."""
        try:
            if known is None or known.adapter is None:
                await self._unload(name)
                return
            before: types_pb2.AdapterInfo = known.adapter
            request = pb.LoadAdapterRequest(
                name=name,
                path=before.path,
                replace=True,
                registered_ms=before.registered_ms,
                pinned=before.pinned,
            )
            await self._fleet.ask_all((), lambda stub: stub.LoadAdapter(request, timeout=_LOAD_SECONDS))
        except ServiceError as error:
            _log.warning("adapter %s is not on all workers as it was before: %s", name, error.log_text)

    def _find(self, name: str) -> ServedModel | None:
        try:
            return self._catalog.get(name)
        except NotFound:
            return None

    def _base(self, name: str) -> ServedModel:
        models = {model.name: model for model in self._catalog.models()}
        model = models.get(self._catalog.primary_name(name)) if name else next(iter(models.values()))
        if model is None or (not name and len(models) > 1):
            raise InvalidRequest(
                f"base_model_name is {name!r}; give one of {', '.join(models)}", field="base_model_name"
            )
        return model


class AdapterRoutes:
    """Reads the bodies of both routes, and answers."""

    def __init__(self, serving: ServingContext, service: AdapterService) -> None:
        self._service = service
        self._access = AdminCheck(serving.gate, serving.config.rest_listen)
        strict = serving.config.strict_fields
        self._loads = BodyDecoder(LoadAdapterBody, strict, serving.bodies.reader)
        self._unloads = BodyDecoder(UnloadAdapterBody, strict, serving.bodies.reader)

    async def load(self, exchange: Exchange) -> None:
        """Handles POST /v1/load_lora_adapter."""
        body = self._loads.read(exchange)
        await self._service.load(
            exchange.identity,
            body.lora_name,
            body.lora_path,
            body.base_model_name or "",
            replace=body.load_inplace,
            pinned=body.pinned,
        )
        _respond(exchange, f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload(self, exchange: Exchange) -> None:
        """Handles POST /v1/unload_lora_adapter."""
        body = self._unloads.read(exchange)
        await self._service.unload(exchange.identity, body.lora_name)
        _respond(exchange, f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    def checked(
        self, handle: Callable[[Exchange], Coroutine[None, None, None]]
    ) -> Callable[[Exchange], Coroutine[None, None, None]]:
        """Returns a handler that checks access first."""

        def checking(exchange: Exchange) -> Coroutine[None, None, None]:
            self._access.check_place(exchange.headers)
            return handle(exchange)

        return checking


def adapter_routes(serving: ServingContext, fleet: FleetControl) -> list[Route]:
    """Returns the two routes."""
    routes = AdapterRoutes(serving, AdapterService(serving.catalog, fleet))
    return [
        Route(
            "POST",
            "/v1/load_lora_adapter",
            routes.checked(routes.load),
            "Loads a LoRA adapter on all workers; clients then give its name in place of a model's.",
            LoadAdapterBody,
            content_type="text/plain",
            errors=_ERRORS,
            scope=Scope.ADMIN,
        ),
        Route(
            "POST",
            "/v1/unload_lora_adapter",
            routes.checked(routes.unload),
            "Stops serving a LoRA adapter.",
            UnloadAdapterBody,
            content_type="text/plain",
            errors=_ERRORS,
            scope=Scope.ADMIN,
        ),
    ]


def _check_tenant(identity: Identity, name: str) -> None:
    """Raises PermissionDenied for a name that the tenant may not use, which may be another tenant's."""
    tenant = identity.tenant
    if not tenant.may_use(name):
        raise PermissionDenied(
            f"lora_name: the tenant {tenant.name!r} may not use the name {name!r}; it has "
            f"{', '.join(sorted(tenant.models))}",
            field="lora_name",
        )


def _respond(exchange: Exchange, text: str) -> None:
    exchange.respond(200, text.encode(), "text/plain; charset=utf-8")
