"""ControlService on the gRPC side: drain, stats, cache reset and profiles, asked of the engine."""

from __future__ import annotations

import enum
import logging
from collections.abc import Awaitable, Callable

from baton.rpc.errors import DeadlineExceeded
from baton.rpc.server import Context
from baton.v1 import control_pb2, control_pb2_grpc
from baton.worker.engine_host import EngineHost

_log = logging.getLogger(__name__)

_WRITE_SECONDS = 110.0  # for a profile's trace, which can be large
SERVICE_NAME = control_pb2.DESCRIPTOR.services_by_name["ControlService"].full_name


class Method(enum.IntEnum):
    """What a call to the engine asks for."""

    DRAIN = 1
    GET_STATS = 2
    RESET_PREFIX_CACHE = 3
    AWAIT_IDLE = 4  # answered when no request is left
    START_PROFILE = 5
    STOP_PROFILE = 6


class ControlServicer(control_pb2_grpc.ControlServiceServicer):
    """Operation of this worker. `on_drain` tells the rest of the front that no new work is taken."""

    def __init__(self, host: EngineHost, on_drain: Callable[[], Awaitable[None]]) -> None:
        self._host = host
        self._on_drain = on_drain

    async def Drain(self, request: control_pb2.DrainRequest, context: Context) -> control_pb2.DrainResponse:  # noqa: N802
        return await self.drain(request.timeout_ms)

    async def GetStats(  # noqa: N802
        self, request: control_pb2.GetStatsRequest, context: Context
    ) -> control_pb2.GetStatsResponse:
        return await self.stats(request.audit)

    async def ResetPrefixCache(  # noqa: N802
        self, request: control_pb2.ResetPrefixCacheRequest, context: Context
    ) -> control_pb2.ResetPrefixCacheResponse:
        answer = await self._host.call(Method.RESET_PREFIX_CACHE, request.SerializeToString())
        return control_pb2.ResetPrefixCacheResponse.FromString(answer)

    async def StartProfile(  # noqa: N802
        self, request: control_pb2.StartProfileRequest, context: Context
    ) -> control_pb2.StartProfileResponse:
        answer = await self._host.call(Method.START_PROFILE, request.SerializeToString(), timeout=_WRITE_SECONDS)
        return control_pb2.StartProfileResponse.FromString(answer)

    async def StopProfile(  # noqa: N802
        self, request: control_pb2.StopProfileRequest, context: Context
    ) -> control_pb2.StopProfileResponse:
        answer = await self._host.call(Method.STOP_PROFILE, request.SerializeToString(), timeout=_WRITE_SECONDS)
        return control_pb2.StopProfileResponse.FromString(answer)

    async def drain(self, timeout_ms: int) -> control_pb2.DrainResponse:
        """Takes no new requests; health says so first."""
        await self._on_drain()
        request = control_pb2.DrainRequest(timeout_ms=timeout_ms)
        answer = await self._host.call(Method.DRAIN, request.SerializeToString())
        return control_pb2.DrainResponse.FromString(answer)

    async def stats(self, audit: bool = False) -> control_pb2.GetStatsResponse:
        """Counters and the pool's books, as of now."""
        request = control_pb2.GetStatsRequest(audit=audit)
        answer = await self._host.call(Method.GET_STATS, request.SerializeToString())
        return control_pb2.GetStatsResponse.FromString(answer)

    async def shut_down(self, timeout: float) -> None:
        """Drains, and waits until the last request is gone. The engine aborts what is left at the timeout."""
        left = (await self.drain(max(1, round(timeout * 1000)))).num_requests
        _log.info("draining: %d requests still run, they have %g s", left, timeout)
        try:
            await self._host.call(Method.AWAIT_IDLE, timeout=timeout + 2.0)
        except DeadlineExceeded:
            _log.warning("requests or transfers are left after the drain timeout; leaving anyway")
        else:
            _log.info("drained")
