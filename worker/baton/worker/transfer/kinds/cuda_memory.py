"""Device memory that another process may write, and copies that can be awaited. Knows no pieces.

From the CUDA runtime's documentation: an allocation of cudaMalloc has one IPC handle of 64 bytes. A process of the same
host that opens it maps the memory at an address of its own, until it closes the handle or ends.
"""

from __future__ import annotations

import ctypes
import os
import time
from typing import Any

import torch
from cuda.bindings import runtime
from torch import Tensor

from baton.rpc.errors import InternalError

HANDLE_BYTES = 64
_DEVICE_TO_DEVICE = runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice
_SPIN_SECONDS = 2e-3
_NAP_SECONDS = 50e-6


class CudaCopy:
    """The work that is queued on a stream so far. `ends`: it ends by itself, whatever other processes do.

    `event`: an event of the caller to reuse. If the caller records it again, this copy waits for that, too.
    """

    def __init__(self, stream: torch.cuda.Stream, ends: bool = False, event: torch.cuda.Event | None = None) -> None:
        self._ends = ends
        self._done = torch.cuda.Event() if event is None else event  # type: ignore[no-untyped-call]
        self._done.record(stream)

    def done(self) -> bool:
        """Returns whether the device has completed the work."""
        return bool(self._done.query())  # type: ignore[no-untyped-call]

    def wait(self, seconds: float) -> bool:
        """Waits at most `seconds` and returns `done`. Work that ends by itself is awaited to its end."""
        if self._ends:
            self._done.synchronize()
            return True
        now = time.monotonic()
        spun, ends = now + _SPIN_SECONDS, now + seconds
        while not self.done():
            now = time.monotonic()
            if now >= ends:
                return False
            if now < spun:
                os.sched_yield()
            else:
                time.sleep(_NAP_SECONDS)
        return True


def make_events(count: int, stream: torch.cuda.Stream) -> list[torch.cuda.Event]:
    """Creates events that exist on the device already; torch creates an event only when it is first recorded."""
    events = [torch.cuda.Event() for _ in range(count)]  # type: ignore[no-untyped-call]
    for event in events:
        event.record(stream)
    return events


class DeviceMemory:
    """A separate allocation, with a handle for other processes."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.address: int = int(_checked(runtime.cudaMalloc(num_bytes), f"{num_bytes} bytes of staging"))
        self.tensor = _as_tensor(self.address, num_bytes)  # uint8

    def handle(self) -> bytes:
        """Returns HANDLE_BYTES bytes, the same in every call."""
        handle = _checked(runtime.cudaIpcGetMemHandle(self.address), "a handle of staging memory")
        return ctypes.string_at(handle.getPtr(), HANDLE_BYTES)

    def close(self) -> None:
        """Frees the memory. No other process may have it open. Idempotent."""
        if self.address:
            _checked(runtime.cudaFree(self.address), "freeing staging memory")
            self.address = 0


class PeerMemory:
    """The DeviceMemory of another process."""

    def __init__(self, handle: bytes) -> None:
        opened = runtime.cudaIpcMemHandle_t()
        ctypes.memmove(opened.getPtr(), handle, HANDLE_BYTES)
        flags = runtime.cudaIpcMemLazyEnablePeerAccess
        self.address: int = int(_checked(runtime.cudaIpcOpenMemHandle(opened, flags), "opening the peer's memory"))

    def copy_in(self, offset: int, source: int, num_bytes: int, stream: int) -> None:
        """Queues a copy from device memory of this process to `offset`, by a copy engine."""
        status = runtime.cudaMemcpyAsync(self.address + offset, source, num_bytes, _DEVICE_TO_DEVICE, stream)
        _checked(status, "a copy to the peer's memory")

    def close(self) -> None:
        """Closes the handle. No copy may be in progress. Idempotent."""
        if self.address:
            _checked(runtime.cudaIpcCloseMemHandle(self.address), "closing the peer's memory")
            self.address = 0


class _Window:
    """Memory that torch did not allocate, as an object that torch can wrap."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _as_tensor(address: int, num_bytes: int) -> Tensor:
    return torch.as_tensor(_Window(address, num_bytes), device="cuda")


def _checked(answer: tuple[Any, ...], what: str) -> Any:
    status, *values = answer
    if status != runtime.cudaError_t.cudaSuccess:
        _, name = runtime.cudaGetErrorName(status)
        raise InternalError(f"{what}: {name.decode()}")
    return values[0] if values else None
