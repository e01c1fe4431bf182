"""The methods of the public gRPC API about LoRA adapters, for keys with the scope admin."""

from __future__ import annotations

from abc import ABC, abstractmethod

from baton.gateway.access.admin_check import AdminCheck
from baton.gateway.access.identity import Identity
from baton.gateway.system.adapters import AdapterService
from baton.rpc.errors import ServiceError, Unsupported
from baton.rpc.server.server import Context
from baton.v1 import inference_pb2

# The service's fields, by those of REST.
_FIELDS = {"lora_name": "name", "lora_path": "path", "base_model_name": "model"}


class AdapterMethods(ABC):
    """Answers AddAdapter and RemoveAdapter of InferenceService."""

    _adapters: AdapterService | None  # None: the gateway controls no workers
    _admin: AdminCheck

    @abstractmethod
    def _identity(self, context: Context) -> Identity:
        """Returns the identity of a call."""

    async def AddAdapter(  # noqa: N802
        self, request: inference_pb2.AddAdapterRequest, context: Context
    ) -> inference_pb2.AddAdapterResponse:
        service, identity = self._checked(context, "AddAdapter"), self._identity(context)
        try:
            await service.load(
                identity, request.name, request.path, request.model, replace=request.replace, pinned=request.pinned
            )
        except ServiceError as error:
            raise _named(error) from error
        return inference_pb2.AddAdapterResponse()

    async def RemoveAdapter(  # noqa: N802
        self, request: inference_pb2.RemoveAdapterRequest, context: Context
    ) -> inference_pb2.RemoveAdapterResponse:
        service = self._checked(context, "RemoveAdapter")
        try:
            await service.unload(self._identity(context), request.name)
        except ServiceError as error:
            raise _named(error) from error
        return inference_pb2.RemoveAdapterResponse()

    def _checked(self, context: Context, what: str) -> AdapterService:
        self._admin.check(self._identity(context), {}, what)
        if self._adapters is None:
            raise Unsupported(f"{what}: this gateway controls no workers")
        return self._adapters


def _named(error: ServiceError) -> ServiceError:
    """Names the field as gRPC calls it."""
    error.field = _FIELDS.get(error.field or "", error.field)
    return error
