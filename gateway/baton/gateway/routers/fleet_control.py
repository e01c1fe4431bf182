"""Calls ControlService on the workers of this gateway's models and combines their answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any, Protocol, TypeVar

import grpc

from baton.gateway.routers.client import RouterReply
from baton.rpc.channel import Dial
from baton.rpc.errors import Mismatch, NotFound, ServiceError, Unavailable, error_from_rpc
from baton.v1 import control_pb2_grpc, router_pb2, types_pb2

T = TypeVar("T")

_DECODES = frozenset({types_pb2.WORKER_ROLE_DECODE, types_pb2.WORKER_ROLE_BOTH})

Call = Callable[[Any], Awaitable[T]]  # takes a ControlService stub


class Routers(Protocol):
    """The operations on routers that fleet control needs."""

    async def workers(self) -> Sequence[router_pb2.WorkerEntry]:
        """Returns the known workers. Raises Unavailable."""

    async def fleets(self, max_placements: int) -> Sequence[RouterReply]:
        """Returns each router's reply about the fleet. Raises nothing."""

    async def explain(self, request: router_pb2.ExplainRequest) -> router_pb2.ExplainResponse:
        """Explains a placement. Raises NotFound, Unavailable."""


class FleetControl:
    """Calls workers of this gateway's models. `models` returns their names."""

    def __init__(self, routers: Routers, models: Callable[[], Collection[str]], dial: Dial) -> None:
        self.routers = routers
        self._models = models
        self._dial = dial

    async def ask_all(self, worker_ids: Collection[str], call: Call[T]) -> dict[str, T]:
        """Calls these workers, or all, concurrently.

        After all have answered, raises the first refusal with its worker's name.
        """
        chosen = await self._choose(worker_ids)
        answers = await asyncio.gather(*(self._ask(entry, call) for entry in chosen), return_exceptions=True)
        done = {e.state.worker_id: a for e, a in zip(chosen, answers, strict=True) if not isinstance(a, BaseException)}
        for answer in answers:
            if isinstance(answer, ServiceError):
                raise _with_done(answer, done)
            if isinstance(answer, BaseException):
                raise answer
        return done

    async def ask_in_turn(self, worker_ids: Collection[str], call: Call[T]) -> dict[str, T]:
        """Calls one worker after another. Raises the first refusal without calling further workers."""
        done: dict[str, T] = {}
        for entry in await self._choose(worker_ids):
            try:
                done[entry.state.worker_id] = await self._ask(entry, call)
            except ServiceError as error:
                raise _with_done(error, done) from error
        return done

    async def check_still_decodes(self, worker_ids: Collection[str]) -> None:
        """Raises Mismatch if without these workers none decodes for one of their models."""
        chosen = {entry.state.worker_id: entry.state.model.name for entry in await self._choose(worker_ids)}
        left = {
            entry.state.model.name
            for entry in await self.routers.workers()
            if entry.alive and entry.state.worker_id not in chosen and entry.state.role in _DECODES
        }
        for worker_id, model in chosen.items():
            if model not in left:
                raise Mismatch(f"no other worker decodes for {model}: {worker_id} must go on decoding", field="role")

    async def _choose(self, worker_ids: Collection[str]) -> list[router_pb2.WorkerEntry]:
        models = self._models()
        known = {entry.state.worker_id: entry for entry in await self.routers.workers() if entry.alive}
        ours = {worker_id: entry for worker_id, entry in known.items() if entry.state.model.name in models}
        for worker_id in worker_ids:
            if worker_id not in ours:
                names = ", ".join(sorted(ours)) or "none"
                raise NotFound(f"unknown worker {worker_id!r}; give one of: {names}", field="worker_id")
        if not ours:
            raise Unavailable("no worker is alive")
        return [ours[worker_id] for worker_id in sorted(worker_ids or ours)]

    async def _ask(self, entry: router_pb2.WorkerEntry, call: Call[T]) -> T:
        worker_id = entry.state.worker_id
        async with self._dial(entry.address) as channel:
            try:
                return await call(control_pb2_grpc.ControlServiceStub(channel))
            except grpc.aio.AioRpcError as failed:
                error = error_from_rpc(failed, f"worker {worker_id}")
        error.message = f"worker {worker_id}: {error.message}"
        error.worker_id = error.worker_id or worker_id
        raise error


def _with_done(error: ServiceError, done: Collection[str]) -> ServiceError:
    if done:
        error.message = f"{error.message} (done on: {', '.join(sorted(done))})"
    return error
