"""The adapters that requests may name on this worker: from its start, loaded at run time, and found in a folder."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from baton.rpc.errors import (
    AlreadyExists,
    InvalidRequest,
    Mismatch,
    NotFound,
    PermissionDenied,
    ServiceError,
    Unsupported,
)
from baton.v1 import control_pb2, types_pb2, worker_pb2
from baton.worker.adapters.memory import AdapterMemory, HostAdapter
from baton.worker.adapters.resolvers.resolvers import Resolvers, is_within
from baton.worker.core import AdapterRef
from baton.worker.engine.adapters.folder_watch import FolderWatch
from baton.worker.engine.adapters.loads import Loads
from baton.worker.engine.adapters.pool import AdapterPool
from baton.worker.engine.adapters.resolving import Refuse, Reply, Resolving
from baton.worker.requests.state import RequestState

_log = logging.getLogger(__name__)

_DIGEST_BYTES = 16
_MAX_NAME = 256

Submit = worker_pb2.SubmitRequest | worker_pb2.PrefillSubmit


@dataclass(frozen=True, slots=True)
class DirectorySettings:
    """Where adapters may come from."""

    static: Mapping[str, str] = field(default_factory=dict)  # folders by name
    folders: tuple[str, ...] = ()  # in which adapters loaded at run time must lie
    resolver_folder: str = ""
    reserved: tuple[str, ...] = ()  # names of the model
    pinned: tuple[str, ...] = ()  # of `static`
    resolvers: Resolvers | None = None  # None: no adapter is loaded by its name alone


class AdapterDirectory:
    """Adapters by name. Only the engine's thread uses it. `changed`: called when an adapter appears or is gone."""

    def __init__(
        self,
        memory: AdapterMemory,
        pool: AdapterPool[RequestState],
        settings: DirectorySettings,
        wake: Callable[[], object] = lambda: None,
        changed: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.time,
        searches: Loads | None = None,  # of resolvers
    ) -> None:
        self.changed = changed
        self._memory = memory
        self._pool = pool
        self._settings = settings
        self._clock = clock
        self._loaded: dict[str, types_pb2.AdapterInfo] = {}  # at run time
        self._static = {name: self._read_static(name, path) for name, path in settings.static.items()}
        pool.pin(self._pinned_digests())
        folder = settings.resolver_folder
        self._watch = FolderWatch(Path(folder), memory.digest, wake) if folder else None
        self._found: dict[str, types_pb2.AdapterInfo] = {}
        self._resolving: Resolving | None = None
        if settings.resolvers is not None:
            assert searches is not None, "resolvers have threads of their own"
            self._resolving = Resolving(settings.resolvers, searches, self.load)

    def close(self) -> None:
        """Ends the thread that reads the folder. Idempotent."""
        if self._watch is not None:
            self._watch.close()

    @property
    def resolvable(self) -> tuple[str, ...]:
        """The patterns of names that resolvers are asked for."""
        return () if self._settings.resolvers is None else self._settings.resolvers.patterns

    def infos(self) -> list[types_pb2.AdapterInfo]:
        """Returns all adapters by name."""
        every = {**self._found, **self._loaded, **self._static}
        return [every[name] for name in sorted(every)]

    def on_device(self) -> list[str]:
        """Returns the names, sorted, by which requests find an adapter on the device.

        Contents that have several names are there by each; those of a name that was replaced are there by none.
        """
        resident = self._pool.resident()
        served = {info.name: info.digest for info in self.infos()}
        names = {name for name, digest in served.items() if digest in resident}
        return sorted(names | {name for name in resident.values() if name not in served})

    def counters(self) -> control_pb2.AdapterCounters:
        """Returns totals since the start, and what is present."""
        pool = self._pool
        message = pool.stats.message()
        message.num_on_device = len(pool.resident())
        message.max_on_device = self._memory.num_slots
        message.num_in_host_memory = pool.num_in_host_memory
        message.num_pinned = pool.num_pinned
        message.num_served = len(self._found) + len(self._loaded) + len(self._static)
        message.running.extend(pool.running())
        message.waiting.extend(pool.waiting())
        return message

    def check(self) -> None:
        """Takes what the folder holds now, and what resolvers have found."""
        if self._resolving is not None:
            self._resolving.settle()
        if self._watch is None or (folders := self._watch.take()) is None:
            return
        now = round(self._clock() * 1000)
        before, self._found = self._found, {}
        for name, (path, digest) in folders.items():
            if name in self._settings.reserved:
                continue
            old = before.get(name)
            if old is None or old.digest != digest:
                old = types_pb2.AdapterInfo(name=name, path=path, digest=digest, registered_ms=now)
            self._found[name] = old
        if before != self._found:
            _log.info("adapters in %s: %d", self._settings.resolver_folder, len(self._found))
            self.changed()

    def ref_of(self, submit: Submit) -> AdapterRef | None:
        """Returns the adapter of a request; None: it has none. Raises a ServiceError that names the field."""
        if not submit.adapter:
            return None
        if not submit.HasField("adapter_info"):
            return self._named(submit.adapter)
        info = submit.adapter_info
        if len(info.digest) != _DIGEST_BYTES:
            raise InvalidRequest(
                f"adapter_info.digest has {len(info.digest)} bytes; it must have {_DIGEST_BYTES}",
                field="adapter_info.digest",
            )
        self._check_path(info.path, "adapter_info.path")
        return AdapterRef(submit.adapter, info.path, info.digest)

    def load(self, request: control_pb2.LoadAdapterRequest, reply: Reply, refuse: Refuse) -> None:
        """Reads an adapter beside running steps, then serves it. Raises a ServiceError, or refuses with one later."""
        if request.resolve:
            self._resolve(request, reply, refuse)
            return
        self._check_name(request.name)
        if not request.path:
            raise InvalidRequest("lora_path is empty; give a folder on the workers", field="lora_path")
        self._check_path(request.path, "lora_path")

        def done(adapter: HostAdapter | None, error: ServiceError | None) -> None:
            if adapter is None or error is not None:
                refuse(error or NotFound(f"{request.path} cannot be read", field="lora_path"))
                return
            try:
                info = self._register(request, adapter)
            except ServiceError as refused:
                refuse(refused)
                return
            reply(control_pb2.LoadAdapterResponse(adapter=info, rank=adapter.rank, num_bytes=adapter.num_bytes))

        self._pool.read(AdapterRef(request.name, request.path, b""), done)

    def unload(self, name: str) -> control_pb2.UnloadAdapterResponse:
        """Serves an adapter no longer. Raises NotFound, or Mismatch for one that was not loaded at run time."""
        if name not in self._loaded:
            if name in self._static or name in self._found:
                origin = "--lora-modules" if name in self._static else "--lora-resolver-folder"
                raise Mismatch(f"adapter {name!r} is one of {origin}: it cannot be unloaded", field="lora_name")
            raise NotFound(f"no adapter is called {name!r}{self._known()}", field="lora_name")
        del self._loaded[name]
        self._pool.pin(self._pinned_digests())
        _log.info("adapter unloaded: %s", name)
        self.changed()
        return control_pb2.UnloadAdapterResponse()

    def _resolve(self, request: control_pb2.LoadAdapterRequest, reply: Reply, refuse: Refuse) -> None:
        known = next((one for one in self.infos() if one.name == request.name), None)
        if known is not None:  # another gateway was faster
            reply(control_pb2.LoadAdapterResponse(adapter=known))
        elif self._resolving is None:
            raise Unsupported(
                "this worker was started without --lora-resolvers; all workers of a model need the same",
                field="lora_name",
            )
        else:
            self._check_name(request.name)
            self._resolving.start(request, reply, refuse)

    def _register(self, request: control_pb2.LoadAdapterRequest, adapter: HostAdapter) -> types_pb2.AdapterInfo:
        old = self._loaded.get(request.name)
        if old is not None and not request.replace:
            if (old.path, old.digest, old.pinned) == (request.path, adapter.digest, request.pinned):
                return old
            raise AlreadyExists(
                f"adapter {request.name!r} is loaded from {old.path} with the digest {old.digest.hex()}; replace it, "
                "or choose another name",
                field="lora_name",
            )
        info = types_pb2.AdapterInfo(
            name=request.name,
            path=request.path,
            digest=adapter.digest,
            registered_ms=request.registered_ms or round(self._clock() * 1000),
            pinned=request.pinned,
        )
        self._pool.pin(self._pinned_digests(info))
        self._loaded[request.name] = info
        _log.info(
            "adapter loaded: %s from %s, rank %d, %d bytes", info.name, info.path, adapter.rank, adapter.num_bytes
        )
        self.changed()
        return info

    def _pinned_digests(self, new: types_pb2.AdapterInfo | None = None) -> set[bytes]:
        """Returns the adapters that are kept on the device, with one that is about to be registered."""
        infos = {**self._loaded, **self._static, **({} if new is None else {new.name: new})}
        return {info.digest for info in infos.values() if info.pinned}

    def _read_static(self, name: str, path: str) -> types_pb2.AdapterInfo:
        """Reads an adapter of the worker's settings, so that a wrong one is reported at start."""
        self._check_name(name, "lora_modules", is_start=True)
        try:
            adapter = self._memory.read(path)
        except ServiceError as error:
            error.field, error.message = "lora_modules", f"lora_modules: {name}: {error.message}"
            raise
        self._pool.adopt(AdapterRef(name, path, adapter.digest), adapter)
        pinned = name in self._settings.pinned
        return types_pb2.AdapterInfo(name=name, path=path, digest=adapter.digest, pinned=pinned)

    def _named(self, name: str) -> AdapterRef:
        for known in (self._static, self._loaded, self._found):
            if (info := known.get(name)) is not None:
                return AdapterRef(name, info.path, info.digest)
        raise NotFound(f"adapter {name!r} is not loaded on this worker{self._known()}", field="adapter")

    def _known(self) -> str:
        names = [info.name for info in self.infos()]
        return f"; there are {', '.join(names[:8])}{' and more' if len(names) > 8 else ''}" if names else ""

    def _check_name(self, name: str, field: str = "lora_name", *, is_start: bool = False) -> None:
        if not name or len(name) > _MAX_NAME or not name.isprintable() or name != name.strip():
            raise InvalidRequest(
                f"{field} is {name[:64]!r}; it must have 1 to {_MAX_NAME} printable characters, none of them a space "
                "at an end",
                field=field,
            )
        if name in self._settings.reserved:
            raise AlreadyExists(f"{field}: {name!r} is the model's own name; choose another one", field=field)
        if not is_start and (name in self._static or name in self._found):
            origin = "--lora-modules" if name in self._static else "--lora-resolver-folder"
            raise AlreadyExists(f"{field}: {name!r} is one of {origin}; choose another one", field=field)

    def _check_path(self, path: str, field: str) -> None:
        """Raises PermissionDenied for a path that is neither served from the start nor in an allowed folder."""
        if path in self._settings.static.values():
            return
        settings = self._settings
        roots = [*settings.folders, *([settings.resolver_folder] if settings.resolver_folder else [])]
        roots += [] if settings.resolvers is None else settings.resolvers.roots
        if not is_within(path, roots):
            allowed = ", ".join(roots) or "none: start workers with --lora-folders"
            raise PermissionDenied(f"{field} {path!r} is outside the folders of adapters ({allowed})", field=field)
