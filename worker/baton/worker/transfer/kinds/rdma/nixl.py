"""The part of NIXL that is used here: agents over its UCX backend, registered memory, one-sided writes.

Calls the library's bindings directly, because its Python class polls in a loop that uses a whole core. An agent is one
UCX endpoint with sockets or queue pairs of its own. After it is closed, its registered memory is no longer read or
written. UCX's `cma` is therefore left out: through it another process could write memory by address, without the agent.
Setting UCX_TLS overrides this, and with it the guarantee.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import threading
from dataclasses import dataclass
from typing import Any

from baton.rpc.errors import Mismatch, Unavailable, Unsupported

_PACKAGES = ("nixl_cu13", "nixl_cu12")
_BACKEND = "UCX"
_BACKEND_PARAMS = {"engine_config": "TLS=^cma"}
_POLL_MICROSECONDS = 10_000  # between polls of the progress thread, when no descriptor wakes it


@dataclass(frozen=True, slots=True)
class Memory:
    """A contiguous range of memory, which lives at least as long as its agent."""

    address: int
    num_bytes: int
    on_device: bool = False
    device: int = 0  # index of the GPU


def installed() -> bool:
    """Returns whether NIXL is installed. Loads nothing."""
    return any(importlib.util.find_spec(package) is not None for package in _PACKAGES)


def load(cuda_major: int | None = None) -> Any:
    """Loads the bindings of the wheel for this CUDA, or any wheel for host memory. Raises Unsupported."""
    os.environ.setdefault("UCX_LOG_FILE", "stderr")  # read when the library is loaded; its default is stdout
    packages = _PACKAGES if cuda_major is None else (f"nixl_cu{cuda_major}",)
    problems = []
    for package in packages:
        try:
            return importlib.import_module(f"{package}._bindings")
        except ImportError as error:
            problems.append(f"{package}: {error}")
    name = packages[0].replace("_", "-")
    raise Unsupported(f"transport rdma needs NIXL (pip install {name}; Linux only): {'; '.join(problems)}")


class Agent:
    """An endpoint that writes other agents' memory, and whose memory others write. Thread-safe.

    Names must be unique among all agents that ever meet.
    """

    def __init__(self, bindings: Any, name: str) -> None:
        """Raises Unavailable if UCX finds no network."""
        self.name = name
        self._nixl = bindings
        self._lock = threading.Lock()
        config = bindings.nixlAgentConfig()
        config.useProgThread = True
        config.useListenThread = False
        config.syncMode = bindings.NIXL_THREAD_SYNC_STRICT
        config.pthrDelay = _POLL_MICROSECONDS
        try:
            self._agent: Any = bindings.nixlAgent(name, config)
            self._backend = self._agent.createBackend(_BACKEND, _BACKEND_PARAMS)
        except Exception as error:
            raise Unavailable(
                f"NIXL has no usable {_BACKEND} backend here: {error!r}; UCX_LOG_LEVEL=info logs why"
            ) from error

    def register(self, memory: Memory) -> bytes:
        """Registers memory with the network. Returns the metadata for another agent's `join`."""
        with self._lock:
            agent = self._opened()
            listed = self._nixl.nixlRegDList(
                self._kind(memory), [(memory.address, memory.num_bytes, memory.device, "")]
            )
            try:
                agent.registerMem(listed, [self._backend])
                return bytes(agent.getLocalPartialMD(listed, True, [self._backend]))
            except Exception as error:
                raise Unavailable(f"cannot register {memory.num_bytes} bytes of staging: {error!r}") from error

    def join(self, peer: str, metadata: bytes) -> None:
        """Adds another agent's memory. Raises Mismatch for metadata that is invalid, or of another agent."""
        with self._lock:
            agent = self._opened()
            try:
                name = bytes(agent.loadRemoteMD(metadata))
            except Exception as error:
                raise Mismatch(f"cannot use the NIXL metadata of {peer}: {error!r}") from error
            if name != peer.encode():
                raise Mismatch(f"the NIXL metadata of {peer} is of another agent, {name!r}")

    def write(self, source: Memory, target: Memory, peer: str) -> Copy:
        """Starts a copy into a peer's memory. Raises Unavailable."""
        with self._lock:
            agent = self._opened()
            try:
                handle = agent.createXferReq(
                    self._nixl.NIXL_WRITE, self._listed(source), self._listed(target), peer, "", [self._backend]
                )
            except Exception as error:
                raise Unavailable(f"cannot start a copy of {source.num_bytes} bytes: {error!r}") from error
            copy = Copy(self, handle)
            copy.status = self._tried(agent.postXferReq, handle, "")
            return copy

    def close(self) -> None:
        """Ends every copy and connection. Idempotent."""
        with self._lock:
            self._agent = None  # the library's destructor ends all

    @property
    def closed(self) -> bool:
        """Whether the agent is closed."""
        return self._agent is None

    # For copies.

    def status_of(self, handle: int) -> Any:
        """Returns the status of a copy. Raises Unavailable if it failed."""
        with self._lock:
            return self._tried(self._opened().getXferStatus, handle)

    def release(self, handle: int) -> None:
        """Frees a copy that has ended."""
        with self._lock:
            if self._agent is not None:
                self._tried(self._agent.releaseXferReq, handle)

    def in_progress(self, status: Any) -> bool:
        """Returns whether a status means that the copy is still running."""
        return bool(status == self._nixl.NIXL_IN_PROG)

    def _tried(self, verb: Any, *arguments: Any) -> Any:
        try:
            return verb(*arguments)
        except Exception as error:
            raise Unavailable(f"the copy failed: {error!r}") from error

    def _opened(self) -> Any:
        if self._agent is None:
            raise Unavailable("the NIXL agent is closed")
        return self._agent

    def _listed(self, memory: Memory) -> Any:
        return self._nixl.nixlXferDList(self._kind(memory), [(memory.address, memory.num_bytes, memory.device)])

    def _kind(self, memory: Memory) -> Any:
        return self._nixl.VRAM_SEG if memory.on_device else self._nixl.DRAM_SEG


class Copy:
    """A write in progress. One thread uses it."""

    def __init__(self, agent: Agent, handle: int) -> None:
        self.status: Any = None
        self._agent = agent
        self._handle = handle
        self._ended = False

    def done(self) -> bool:
        """Returns whether every byte is in the peer's memory. Raises Unavailable if the copy failed."""
        if not self._ended:
            if self._agent.in_progress(self.status):
                self.status = self._agent.status_of(self._handle)
            self._ended = not self._agent.in_progress(self.status)
            if self._ended:
                self._agent.release(self._handle)
        return self._ended
