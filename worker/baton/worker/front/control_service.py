"""ControlService on the gRPC side: calls the engine, and updates readiness before the engine refuses work."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from google.protobuf.message import Message

from baton.rpc.errors import DeadlineExceeded, Unavailable
from baton.rpc.server.server import Context
from baton.v1 import control_pb2, control_pb2_grpc
from baton.worker.front.engine_client import EngineClient
from baton.worker.link.methods import Method

_log = logging.getLogger(__name__)

_WRITE_SECONDS = 110.0  # for the trace of a profile, which can be large
_STOP_SECONDS = 60.0  # the meaning of timeout_ms=0
_LOAD_SECONDS = 600.0  # for reading weights and allocating memory
SERVICE_NAME = control_pb2.DESCRIPTOR.services_by_name["ControlService"].full_name


class ControlServicer(control_pb2_grpc.ControlServiceServicer):
    """Operates this worker. `set_ready` sets whether it accepts new work."""

    def __init__(self, engine: EngineClient, set_ready: Callable[[bool], Awaitable[None]]) -> None:
        self._engine = engine
        self._set_ready = set_ready
        self._leaving = False

    async def Drain(self, request: control_pb2.DrainRequest, context: Context) -> control_pb2.DrainResponse:  # noqa: N802
        return await self.drain(request.timeout_ms)

    async def Pause(self, request: control_pb2.PauseRequest, context: Context) -> control_pb2.PauseResponse:  # noqa: N802
        answer = await self._change(Method.PAUSE, request, _stop_seconds(request.timeout_ms))
        return control_pb2.PauseResponse.FromString(answer)

    async def Resume(self, request: control_pb2.ResumeRequest, context: Context) -> control_pb2.ResumeResponse:  # noqa: N802
        if self._leaving:
            raise Unavailable("the worker is shutting down")
        await self._change(Method.RESUME, request, _STOP_SECONDS, stops=False)
        return control_pb2.ResumeResponse()

    async def Sleep(self, request: control_pb2.SleepRequest, context: Context) -> control_pb2.SleepResponse:  # noqa: N802
        answer = await self._change(Method.SLEEP, request, _stop_seconds(request.timeout_ms) + _LOAD_SECONDS)
        return control_pb2.SleepResponse.FromString(answer)

    async def WakeUp(self, request: control_pb2.WakeUpRequest, context: Context) -> control_pb2.WakeUpResponse:  # noqa: N802
        answer = await self._change(Method.WAKE_UP, request, _LOAD_SECONDS, stops=False)
        return control_pb2.WakeUpResponse.FromString(answer)

    async def ReloadWeights(  # noqa: N802
        self, request: control_pb2.ReloadWeightsRequest, context: Context
    ) -> control_pb2.ReloadWeightsResponse:
        seconds = _LOAD_SECONDS + _stop_seconds(request.timeout_ms)
        answer = await self._change(Method.RELOAD_WEIGHTS, request, seconds, stops=False)
        return control_pb2.ReloadWeightsResponse.FromString(answer)

    async def SwitchRole(  # noqa: N802
        self, request: control_pb2.SwitchRoleRequest, context: Context
    ) -> control_pb2.SwitchRoleResponse:
        answer = await self._change(Method.SWITCH_ROLE, request, _stop_seconds(request.timeout_ms))
        return control_pb2.SwitchRoleResponse.FromString(answer)

    async def GetStats(  # noqa: N802
        self, request: control_pb2.GetStatsRequest, context: Context
    ) -> control_pb2.GetStatsResponse:
        return await self.stats(request.audit)

    async def ResetPrefixCache(  # noqa: N802
        self, request: control_pb2.ResetPrefixCacheRequest, context: Context
    ) -> control_pb2.ResetPrefixCacheResponse:
        answer = await self._change(
            Method.RESET_PREFIX_CACHE, request, _stop_seconds(0), stops=request.recompute_running
        )
        return control_pb2.ResetPrefixCacheResponse.FromString(answer)

    async def StartProfile(  # noqa: N802
        self, request: control_pb2.StartProfileRequest, context: Context
    ) -> control_pb2.StartProfileResponse:
        answer = await self._engine.call(Method.START_PROFILE, request.SerializeToString(), timeout=_WRITE_SECONDS)
        return control_pb2.StartProfileResponse.FromString(answer)

    async def StopProfile(  # noqa: N802
        self, request: control_pb2.StopProfileRequest, context: Context
    ) -> control_pb2.StopProfileResponse:
        answer = await self._engine.call(Method.STOP_PROFILE, request.SerializeToString(), timeout=_WRITE_SECONDS)
        return control_pb2.StopProfileResponse.FromString(answer)

    async def LoadAdapter(  # noqa: N802
        self, request: control_pb2.LoadAdapterRequest, context: Context
    ) -> control_pb2.LoadAdapterResponse:
        answer = await self._engine.call(Method.LOAD_ADAPTER, request.SerializeToString(), timeout=_LOAD_SECONDS)
        return control_pb2.LoadAdapterResponse.FromString(answer)

    async def UnloadAdapter(  # noqa: N802
        self, request: control_pb2.UnloadAdapterRequest, context: Context
    ) -> control_pb2.UnloadAdapterResponse:
        answer = await self._engine.call(Method.UNLOAD_ADAPTER, request.SerializeToString())
        return control_pb2.UnloadAdapterResponse.FromString(answer)

    async def drain(self, timeout_ms: int) -> control_pb2.DrainResponse:
        """Reports that the worker is not ready, then refuses new requests."""
        await self._set_ready(False)
        request = control_pb2.DrainRequest(timeout_ms=timeout_ms)
        answer = await self._engine.call(Method.DRAIN, request.SerializeToString())
        return control_pb2.DrainResponse.FromString(answer)

    async def stats(self, audit: bool = False) -> control_pb2.GetStatsResponse:
        """Returns current counters, and the block pool's counts."""
        request = control_pb2.GetStatsRequest(audit=audit)
        answer = await self._engine.call(Method.GET_STATS, request.SerializeToString())
        return control_pb2.GetStatsResponse.FromString(answer)

    async def shut_down(self, timeout: float) -> None:
        """Drains, and waits for the last request. At the timeout the engine aborts the rest."""
        self._leaving = True
        left = (await self.drain(max(1, round(timeout * 1000)))).num_requests
        _log.info("draining: %d requests are running, timeout %g s", left, timeout)
        try:
            await self._engine.call(Method.AWAIT_IDLE, timeout=timeout + 2.0)
        except DeadlineExceeded:
            _log.warning("requests or transfers are left after the drain timeout; shutting down")
        else:
            _log.info("drained")

    async def _change(self, method: Method, request: Message, seconds: float, *, stops: bool = True) -> bytes:
        """Calls the engine. If the change stops requests, unsets readiness first; updates it afterwards."""
        if stops:
            await self._set_ready(False)
        try:
            return await self._engine.call(method, request.SerializeToString(), timeout=seconds)
        finally:
            stats = await self.stats()
            serves = stats.activity == control_pb2.WORKER_ACTIVITY_SERVING
            await self._set_ready(serves and not self._leaving)


def _stop_seconds(timeout_ms: int) -> float:
    return (timeout_ms / 1000 or _STOP_SECONDS) + 2.0
