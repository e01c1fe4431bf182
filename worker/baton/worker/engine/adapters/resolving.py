"""Loads of adapters that are known by name alone: finds their folders beside the engine, once for each name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from baton.rpc.errors import ServiceError
from baton.v1 import control_pb2
from baton.worker.adapters.resolvers.resolvers import Resolvers
from baton.worker.engine.adapters.loads import Loads

Reply = Callable[[control_pb2.LoadAdapterResponse], None]
Refuse = Callable[[ServiceError], None]
Load = Callable[[control_pb2.LoadAdapterRequest, Reply, Refuse], None]


class Resolving:
    """Requests that wait for a resolver. Only the engine's thread uses it. `load`: loads from a folder."""

    def __init__(self, resolvers: Resolvers, loads: Loads, load: Load) -> None:
        self.resolvers = resolvers
        self._loads = loads
        self._load = load
        self._waiters: dict[str, list[tuple[Reply, Refuse]]] = {}  # by name, until it is loaded or refused

    def start(self, request: control_pb2.LoadAdapterRequest, reply: Reply, refuse: Refuse) -> None:
        """Answers later, with the requests for the same name. Raises PermissionDenied."""
        self.resolvers.check_name(request.name)
        waiters = self._waiters.setdefault(request.name, [])
        waiters.append((reply, refuse))
        if len(waiters) == 1:
            self._loads.start(request, partial(self.resolvers.find, request.name))

    def settle(self) -> None:
        """Loads what was found since the last call."""
        for ended in self._loads.take():
            name = ended.key.name
            if ended.error is not None:
                self._refuse(name, ended.error)
                continue
            registered = ended.key.registered_ms
            found = control_pb2.LoadAdapterRequest(name=name, path=ended.result, registered_ms=registered)
            try:
                self._load(found, partial(self._reply, name), partial(self._refuse, name))
            except ServiceError as error:
                self._refuse(name, error)

    def _reply(self, name: str, answer: control_pb2.LoadAdapterResponse) -> None:
        for reply, _ in self._waiters.pop(name):
            reply(answer)

    def _refuse(self, name: str, error: ServiceError) -> None:
        for _, refuse in self._waiters.pop(name):
            refuse(error)
