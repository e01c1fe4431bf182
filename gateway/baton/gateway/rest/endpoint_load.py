"""The response header endpoint-load-metrics: how loaded the fleet is, in ORCA's forms, for load balancers that ask."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from baton.gateway.access.identity import Identity, Scope
from baton.gateway.routers.client import RouterReply
from baton.rpc.errors import InvalidRequest, PermissionDenied
from baton.v1 import router_pb2

REQUEST_HEADER = b"endpoint-load-metrics-format"
RESPONSE_HEADER = "endpoint-load-metrics"
_FORMS = ("TEXT", "JSON")
_FRESH_SECONDS = 0.5


class Fleets(Protocol):
    """The operation on routers that the load needs."""

    async def fleets(self, max_placements: int) -> Sequence[RouterReply]:
        """Returns each router's reply about the fleet. Raises nothing."""


class EndpointLoad:
    """The load of the workers of this gateway's models, at most half a second old. `models` returns their names."""

    def __init__(
        self, routers: Fleets, models: Callable[[], Collection[str]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._routers = routers
        self._models = models
        self._clock = clock
        self._lock = asyncio.Lock()
        self._read_at = -_FRESH_SECONDS
        self._metrics: dict[str, float] = {}

    async def header(self, form: str, identity: Identity) -> dict[str, str]:
        """Returns the header in this form, or none while no router answers. Raises InvalidRequest, PermissionDenied."""
        name = REQUEST_HEADER.decode()
        if form.upper() not in _FORMS:
            raise InvalidRequest(f"{name} is {form!r}; give one of {', '.join(_FORMS)}", field=name)
        if not {Scope.METRICS, Scope.ADMIN} & set(identity.scopes):
            raise PermissionDenied(f"{name} needs an API key with the scope {Scope.METRICS.value}.")
        metrics = await self._current()
        return {RESPONSE_HEADER: written(form.upper(), metrics)} if metrics else {}

    async def _current(self) -> dict[str, float]:
        async with self._lock:
            if self._clock() - self._read_at >= _FRESH_SECONDS:
                replies = await self._routers.fleets(0)
                fleet = next((reply.fleet for reply in replies if reply.fleet is not None), None)
                self._metrics = {} if fleet is None else metrics_of(fleet, self._models())
                self._read_at = self._clock()
            return self._metrics


def metrics_of(fleet: router_pb2.GetFleetResponse, models: Collection[str]) -> dict[str, float]:
    """Returns vLLM's metrics over the live workers of these models; none without such a worker."""
    loads = [one.state.load for one in fleet.workers if one.alive and one.state.model.name in models]
    if not loads:
        return {}
    num_blocks = sum(load.num_blocks for load in loads)
    num_free = sum(load.num_free_blocks for load in loads)
    return {
        "kv_cache_usage_perc": 1 - num_free / num_blocks if num_blocks else 0.0,
        "num_requests_waiting": float(sum(load.queue_depth for load in loads)),
    }


def written(form: str, metrics: dict[str, float]) -> str:
    """Returns the header's value."""
    if form == "JSON":
        return f"JSON {json.dumps({'named_metrics': metrics})}"
    return "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in metrics.items())
