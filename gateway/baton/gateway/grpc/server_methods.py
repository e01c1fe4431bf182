"""The methods of the public gRPC API about the server: its tokenizer, its state, and the requests that it runs."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from hashlib import sha256

from baton.gateway.access.identity import Identity, Scope
from baton.gateway.access_log import is_request_id
from baton.gateway.models.served import ModelCatalog
from baton.gateway.models.tokenizer_archive import archive_of
from baton.gateway.serving.running_requests import RunningRequests
from baton.gateway.serving.tenancy import allowed_model
from baton.gateway.version import VERSION
from baton.rpc.errors import InvalidRequest, Mismatch
from baton.rpc.server.server import Context
from baton.v1 import inference_pb2

_PIECE_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What the server's methods need to know of the process."""

    gives_tokenizer: bool = False
    num_running: Callable[[], int] = lambda: 0
    is_ready: Callable[[], bool] = lambda: False
    started: float = field(default_factory=time.monotonic)


class ServerMethods(ABC):
    """GetTokenizer, GetServerInfo and Abort."""

    _catalog: ModelCatalog
    _running: RunningRequests
    _server: ServerFacts

    @abstractmethod
    def _identity(self, context: Context) -> Identity:
        """Returns the identity of a call."""

    async def GetTokenizer(  # noqa: N802
        self, request: inference_pb2.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[inference_pb2.GetTokenizerResponse]:
        identity = self._identity(context)
        if not self._server.gives_tokenizer:
            raise Mismatch("this gateway does not give its tokenizer; start it with --enable-tokenizer-info-endpoint")
        model = allowed_model(self._catalog, identity, request.model)
        archive = await asyncio.to_thread(archive_of, model.files)
        digest = sha256(archive).digest()
        for begin in range(0, len(archive), _PIECE_BYTES):
            is_last = begin + _PIECE_BYTES >= len(archive)
            piece = archive[begin : begin + _PIECE_BYTES]
            yield inference_pb2.GetTokenizerResponse(chunk=piece, sha256=digest if is_last else b"")

    async def GetServerInfo(  # noqa: N802
        self, request: inference_pb2.GetServerInfoRequest, context: Context
    ) -> inference_pb2.GetServerInfoResponse:
        scopes, server = self._identity(context).scopes, self._server
        response = inference_pb2.GetServerInfoResponse(
            version=VERSION,
            uptime_ms=int((time.monotonic() - server.started) * 1000),
            ready=server.is_ready(),
        )
        if Scope.METRICS in scopes or Scope.ADMIN in scopes:
            response.num_running = server.num_running()
        return response

    async def Abort(  # noqa: N802
        self, request: inference_pb2.AbortRequest, context: Context
    ) -> inference_pb2.AbortResponse:
        tenant = self._identity(context).tenant.name
        for index, request_id in enumerate(request.request_ids):
            if not is_request_id(request_id):
                field = f"request_ids.{index}"
                message = f"{field} is no request id; give 1 to 256 visible ASCII characters without spaces"
                raise InvalidRequest(message, field=field)
        return inference_pb2.AbortResponse(num_aborted=self._running.cancel(tenant, request.request_ids))
