"""Operations on workers over HTTP, under vLLM's names, for keys with the admin scope."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any
from urllib.parse import parse_qs

import msgspec

from baton.gateway.access.admin_check import AdminCheck
from baton.gateway.access.identity import Scope
from baton.gateway.http.exchange import Exchange
from baton.gateway.rest.routing import Parameter, Route
from baton.gateway.routers.fleet_control import FleetControl
from baton.gateway.serving.context import ServingContext
from baton.rpc.errors import InvalidRequest
from baton.v1 import control_pb2 as pb
from baton.v1 import types_pb2

_SLEEP_TAGS = {"weights": pb.MEMORY_PART_WEIGHTS, "kv_cache": pb.MEMORY_PART_KV_CACHE}
_MODES = {
    "abort": pb.RUNNING_REQUESTS_ABORT,
    "wait": pb.RUNNING_REQUESTS_WAIT,
    "keep": pb.RUNNING_REQUESTS_KEEP,
}
_ROLES = {
    "prefill": types_pb2.WORKER_ROLE_PREFILL,
    "decode": types_pb2.WORKER_ROLE_DECODE,
    "both": types_pb2.WORKER_ROLE_BOTH,
}
_MOST_SECONDS = 86_400
_MOST_PROFILES = 100
_CALL_SECONDS = 30.0  # added to the worker's own timeout
_PAUSE_SECONDS = 60.0
_LOAD_SECONDS = 660.0
_ERRORS = (400, 403, 404, 429, 501, 503, 504)

_WORKERS = Parameter("worker_id", "A worker; may be repeated. Default: all workers of this gateway's models.", {})
_MODE = Parameter(
    "mode",
    "Running requests: abort moves them to other workers, wait lets them end, keep continues them afterwards.",
    {"enum": list(_MODES), "default": "abort"},
)
_TIMEOUT = Parameter(
    "timeout", "Seconds that running requests get to end.", {"type": "number", "minimum": 0, "default": _PAUSE_SECONDS}
)
_LEVEL = Parameter("level", "1 frees the KV cache, 2 drops the weights too.", {"enum": [1, 2], "default": 1})
_ROLE = Parameter("role", "What the worker computes for others from now on.", {"enum": list(_ROLES)})
_MODEL = Parameter("model", "A folder on the worker, or a hub id. Empty: the last loaded model.", {"type": "string"})
_TAGS = Parameter(
    "tags", "What to wake up; the rest sleeps on. May be repeated. Default: all.", {"enum": list(_SLEEP_TAGS)}
)
_CLEAR = Parameter("clear_cache", "Also drops every cached block.", {"type": "boolean", "default": False})
_RUNNING = Parameter(
    "reset_running_requests",
    "Running requests lose their blocks too, and are computed again.",
    {"type": "boolean", "default": False},
)
_EXTERNAL = Parameter(
    "reset_external", "Changes nothing: host memory is always emptied too.", {"type": "boolean", "default": False}
)
_STEPS = Parameter("num_steps", "Number of steps to record. 0: until /stop_profile.", {"type": "integer", "default": 0})
_DELAY = Parameter(
    "delay_steps", "Steps before the first recorded one, and between two profiles.", {"type": "integer", "default": 0}
)
_PROFILES = Parameter("num_profiles", "Number of profiles, each of num_steps.", {"type": "integer", "default": 1})

Query = Mapping[str, list[str]]


class WorkerAnswer(msgspec.Struct, omit_defaults=True):
    """One worker's answer. Members that it did not report are left out."""

    worker_id: str
    num_requests: int | None = None  # requests kept or still running
    epoch: int | None = None
    digest: str | None = None  # hexadecimal
    num_freed_bytes: int | None = None
    path: str | None = None  # on the worker
    activity: str | None = None
    sleep_level: int | None = None
    asleep: list[str] | None = None  # weights, kv_cache


class AdminAnswer(msgspec.Struct):
    """The answers of all workers that were asked."""

    workers: list[WorkerAnswer]


class SleepState(msgspec.Struct):
    """GET /is_sleeping."""

    is_sleeping: bool  # whether all workers sleep
    workers: list[WorkerAnswer]


class PauseState(msgspec.Struct):
    """GET /is_paused."""

    is_paused: bool  # whether all workers are paused
    workers: list[WorkerAnswer]


class AdminRoutes:
    """Handles the admin routes."""

    def __init__(self, serving: ServingContext, fleet: FleetControl) -> None:
        self._fleet = fleet
        self._access = AdminCheck(serving.gate, serving.config.rest_listen)

    async def drain(self, exchange: Exchange, query: Query) -> None:
        """Handles POST /drain: the worker takes no new requests."""
        if "worker_id" not in query:
            raise InvalidRequest(
                "worker_id is required; draining all workers would stop the service", field="worker_id"
            )
        request = pb.DrainRequest(timeout_ms=_timeout_ms(query, 0.0))
        await self._ask(exchange, query, lambda stub: stub.Drain(request, timeout=_CALL_SECONDS))

    async def pause(self, exchange: Exchange, query: Query) -> None:
        """Handles POST /pause: workers compute nothing."""
        request = pb.PauseRequest(running_requests=_mode(query), timeout_ms=_timeout_ms(query))
        clears = _flag(query, "clear_cache")

        async def call(stub: Any) -> Any:
            answer = await stub.Pause(request, timeout=_seconds(request.timeout_ms))
            if clears:
                await stub.ResetPrefixCache(pb.ResetPrefixCacheRequest(), timeout=_CALL_SECONDS)
            return answer

        await self._ask(exchange, query, call)

    async def resume(self, exchange: Exchange, query: Query) -> None:
        """Handles POST /resume, after a pause or drain."""
        await self._ask(exchange, query, lambda stub: stub.Resume(pb.ResumeRequest(), timeout=_CALL_SECONDS))

    async def sleep(self, exchange: Exchange, query: Query) -> None:
        """Handles POST /sleep: workers free memory."""
        level = _number(query, "level", 1, 1, 2)
        request = pb.SleepRequest(level=level, running_requests=_mode(query), timeout_ms=_timeout_ms(query))
        seconds = _seconds(request.timeout_ms) + _LOAD_SECONDS
        await self._ask(exchange, query, lambda stub: stub.Sleep(request, timeout=seconds))

    async def wake_up(self, exchange: Exchange, query: Query) -> None:
        """Handles POST /wake_up. Workers serve once all that slept is awake."""
        tags = dict.fromkeys(tag for value in query.get("tags", ()) for tag in value.split(","))
        if unknown := [tag for tag in tags if tag not in _SLEEP_TAGS]:
            raise InvalidRequest(f"tags is {unknown[0]!r}; give one of {', '.join(_SLEEP_TAGS)}", field="tags")
        request = pb.WakeUpRequest(parts=[_SLEEP_TAGS[tag] for tag in tags])
        await self._ask(exchange, query, lambda stub: stub.WakeUp(request, timeout=_LOAD_SECONDS))

    async def reload_weights(self, exchange: Exchange, query: Query) -> None:
        """Handles POST /reload_weights, one worker at a time, so that others keep serving."""
        request = pb.ReloadWeightsRequest(
            model=query.get("model", [""])[-1], running_requests=_mode(query), timeout_ms=_timeout_ms(query)
        )
        seconds = _seconds(request.timeout_ms) + _LOAD_SECONDS
        answers = await self._fleet.ask_in_turn(
            query.get("worker_id", ()), lambda stub: stub.ReloadWeights(request, timeout=seconds)
        )
        _respond(exchange, AdminAnswer(_worker_answers(answers)))

    async def switch_role(self, exchange: Exchange, query: Query) -> None:
        """Handles POST /switch_role, of one worker after the other. Refuses to take the last one that decodes."""
        word = query.get("role", [""])[-1]
        if word not in _ROLES:
            raise InvalidRequest(f"role is {word!r}; give one of {', '.join(_ROLES)}", field="role")
        names = query.get("worker_id", ())
        if not names:
            raise InvalidRequest("worker_id is required; name the workers that change their role", field="worker_id")
        if word == "prefill":
            await self._fleet.check_still_decodes(names)
        request = pb.SwitchRoleRequest(role=_ROLES[word], running_requests=_mode(query), timeout_ms=_timeout_ms(query))
        seconds = _seconds(request.timeout_ms)
        answers = await self._fleet.ask_in_turn(names, lambda stub: stub.SwitchRole(request, timeout=seconds))
        _respond(exchange, AdminAnswer(_worker_answers(answers)))

    async def reset_prefix_cache(self, exchange: Exchange, query: Query) -> None:
        """Handles POST /reset_prefix_cache: workers drop every cached block."""
        request = pb.ResetPrefixCacheRequest(recompute_running=_flag(query, "reset_running_requests"))
        _flag(query, "reset_external")  # host memory is always emptied too
        seconds = _seconds(0) if request.recompute_running else _CALL_SECONDS
        await self._ask(exchange, query, lambda stub: stub.ResetPrefixCache(request, timeout=seconds))

    async def start_profile(self, exchange: Exchange, query: Query) -> None:
        """Handles POST /start_profile: workers record steps."""
        request = pb.StartProfileRequest(
            num_steps=_number(query, "num_steps", 0, 0, 2**31),
            delay_steps=_number(query, "delay_steps", 0, 0, 2**31),
            num_profiles=_number(query, "num_profiles", 1, 1, _MOST_PROFILES),
        )
        await self._ask(exchange, query, lambda stub: stub.StartProfile(request, timeout=_PAUSE_SECONDS))

    async def stop_profile(self, exchange: Exchange, query: Query) -> None:
        """Handles POST /stop_profile: workers write their recordings."""
        request = pb.StopProfileRequest()
        await self._ask(exchange, query, lambda stub: stub.StopProfile(request, timeout=2 * _PAUSE_SECONDS))

    async def is_sleeping(self, exchange: Exchange, query: Query) -> None:
        """Handles GET /is_sleeping."""
        workers = await self._activities(query)
        _respond(exchange, SleepState(all(one.activity == "asleep" for one in workers), workers))

    async def is_paused(self, exchange: Exchange, query: Query) -> None:
        """Handles GET /is_paused."""
        workers = await self._activities(query)
        _respond(exchange, PauseState(all(one.activity == "paused" for one in workers), workers))

    def route(
        self,
        verb: str,
        path: str,
        method: Callable[[Exchange, Query], Coroutine[None, None, None]],
        summary: str,
        parameters: tuple[Parameter, ...],
        response: type[msgspec.Struct] = AdminAnswer,
    ) -> Route:
        """Returns the route of one of these methods."""
        return Route(
            verb,
            path,
            self.handler(method),
            summary,
            response=response,
            errors=_ERRORS,
            parameters=parameters,
            scope=Scope.ADMIN,
        )

    def handler(
        self, method: Callable[[Exchange, Query], Coroutine[None, None, None]]
    ) -> Callable[[Exchange], Coroutine[None, None, None]]:
        """Returns a route handler that checks access before the method runs."""

        def handle(exchange: Exchange) -> Coroutine[None, None, None]:
            self._access.check_place(exchange.headers)
            return method(exchange, parse_qs(exchange.query))

        return handle

    async def _ask(self, exchange: Exchange, query: Query, call: Callable[[Any], Any]) -> None:
        answers = await self._fleet.ask_all(query.get("worker_id", ()), call)
        _respond(exchange, AdminAnswer(_worker_answers(answers)))

    async def _activities(self, query: Query) -> list[WorkerAnswer]:
        request = pb.GetStatsRequest()
        return _worker_answers(
            await self._fleet.ask_all(
                query.get("worker_id", ()), lambda stub: stub.GetStats(request, timeout=_CALL_SECONDS)
            )
        )


def admin_routes(serving: ServingContext, fleet: FleetControl) -> list[Route]:
    """Returns the admin routes."""
    admin = AdminRoutes(serving, fleet)
    pausing = (_WORKERS, _MODE, _TIMEOUT)
    route = admin.route
    return [
        route(
            "POST",
            "/drain",
            admin.drain,
            "Drains a worker: it takes no new requests, and running ones end.",
            (_WORKERS, _TIMEOUT),
        ),
        route("POST", "/pause", admin.pause, "Pauses workers between two steps.", (*pausing, _CLEAR)),
        route("POST", "/resume", admin.resume, "Resumes workers after a pause or drain.", (_WORKERS,)),
        route("GET", "/is_paused", admin.is_paused, "Returns whether workers are paused.", (_WORKERS,), PauseState),
        route("POST", "/sleep", admin.sleep, "Frees the memory of workers.", (_LEVEL, *pausing)),
        route("POST", "/wake_up", admin.wake_up, "Restores the memory of sleeping workers.", (_WORKERS, _TAGS)),
        route("GET", "/is_sleeping", admin.is_sleeping, "Returns whether workers sleep.", (_WORKERS,), SleepState),
        route(
            "POST", "/reload_weights", admin.reload_weights, "Loads weights into workers in place.", (_MODEL, *pausing)
        ),
        route("POST", "/switch_role", admin.switch_role, "Changes the role of workers.", (_ROLE, *pausing)),
        route(
            "POST",
            "/reset_prefix_cache",
            admin.reset_prefix_cache,
            "Drops the cached blocks of workers.",
            (_WORKERS, _RUNNING, _EXTERNAL),
        ),
        route(
            "POST",
            "/start_profile",
            admin.start_profile,
            "Starts recording the steps of workers.",
            (_WORKERS, _STEPS, _DELAY, _PROFILES),
        ),
        route("POST", "/stop_profile", admin.stop_profile, "Writes the recordings of workers.", (_WORKERS,)),
    ]


def _worker_answers(answers: Mapping[str, Any]) -> list[WorkerAnswer]:
    return [_worker_answer(worker_id, answers[worker_id]) for worker_id in sorted(answers)]


def _worker_answer(worker_id: str, message: Any) -> WorkerAnswer:
    names = message.DESCRIPTOR.fields_by_name
    answer = WorkerAnswer(worker_id)
    for name in ("num_requests", "epoch", "num_freed_bytes", "path", "sleep_level"):
        if name in names:
            setattr(answer, name, getattr(message, name))
    if "digest" in names:
        answer.digest = message.digest.hex()
    if "asleep" in names:
        answer.asleep = [tag for tag, part in _SLEEP_TAGS.items() if part in message.asleep]
    if "activity" in names:
        name = pb.WorkerActivity.Name(message.activity)
        answer.activity = name.removeprefix("WORKER_ACTIVITY_").lower()
    return answer


def _respond(exchange: Exchange, answer: msgspec.Struct) -> None:
    exchange.respond(200, msgspec.json.encode(answer))


def _mode(query: Query) -> pb.RunningRequests.ValueType:
    word = query.get("mode", ["abort"])[-1]
    if word not in _MODES:
        raise InvalidRequest(f"mode is {word!r}; give one of {', '.join(_MODES)}", field="mode")
    return _MODES[word]


def _flag(query: Query, name: str) -> bool:
    word = query.get(name, ["false"])[-1].lower()
    if word not in ("true", "1", "false", "0"):
        raise InvalidRequest(f"{name} is {word!r}; give true or false", field=name)
    return word in ("true", "1")


def _number(query: Query, name: str, default: int, least: int, most: int) -> int:
    word = query.get(name, [str(default)])[-1]
    if not word.isascii() or not word.isdigit() or len(word) > 10 or not least <= int(word) <= most:
        raise InvalidRequest(f"{name} is {word!r}; it must be from {least} to {most}", field=name)
    return int(word)


def _timeout_ms(query: Query, default: float = _PAUSE_SECONDS) -> int:
    word = query.get("timeout", [str(default)])[-1]
    try:
        seconds = float(word)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= _MOST_SECONDS:
        raise InvalidRequest(f"timeout is {word!r}; it must be from 0 to {_MOST_SECONDS} seconds", field="timeout")
    return round(seconds * 1000)


def _seconds(timeout_ms: int) -> float:
    return (timeout_ms / 1000 or _PAUSE_SECONDS) + _CALL_SECONDS
