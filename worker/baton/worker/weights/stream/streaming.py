"""Streams tensors from files to memory or a device at the disk's speed, through a fixed number of staging buffers."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from baton.rpc.errors import InvalidRequest
from baton.worker.weights.stream.fresh_memory import populate
from baton.worker.weights.stream.pieces import Fill, Place, Read, planned_reads

# Progress: bytes that are read, bytes of the whole stream, seconds since its begin.
Report = Callable[[int, int, float], None]

_REPORT_SECONDS = 0.2
_PART_VALUES = 1 << 17  # that a CPU converts at once
_BUFFERS_PER_READER = 2  # one is read while the other is copied to the device
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """How many readers there are, and how much each reads at once."""

    num_readers: int
    read_bytes: int

    @property
    def staging_bytes(self) -> int:
        """Memory of all staging buffers."""
        return self.num_readers * _BUFFERS_PER_READER * self.read_bytes


def stream_settings(device: torch.device) -> StreamSettings:
    """Returns the settings for a device. What a CPU converts is read in parts that stay in its caches."""
    return StreamSettings(num_readers=8, read_bytes=4 << 20 if device.type == "cpu" else 8 << 20)


@dataclass(frozen=True, slots=True)
class Streamed:
    """What a stream moved."""

    num_bytes: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.num_bytes / 1e9:.2f} GB read at {self.gb_per_second:.2f} GB/s"

    @property
    def gb_per_second(self) -> float:
        return self.num_bytes / 1e9 / self.seconds if self.seconds else 0.0


class TensorStream:
    """Reads the tensors that are added, when `run` is called. Files are read in their order, several at once."""

    def __init__(self, device: torch.device = _CPU, settings: StreamSettings | None = None) -> None:
        self._device = device
        self._settings = settings or stream_settings(device)
        self._fills: list[Fill] = []

    def add(self, place: Place, into: Tensor) -> None:
        """Adds a view of the stream's device, which `run` fills, converted to its dtype."""
        self._fills.append(Fill(place, into))

    def run(self, report: Report = lambda done, total, seconds: None) -> Streamed:
        """Fills all views. Raises InvalidRequest if a file cannot be read, is shorter than expected or changes."""
        reads = planned_reads(self._fills, self._settings.read_bytes)
        self._fills.clear()
        total = sum(read.num_bytes for read in reads)
        started = time.perf_counter()
        with ExitStack() as stack:
            work = _Work(reads, {path: _opened(path, stack) for path in {read.path for read in reads}})
            make = _HostReader if self._device.type == "cpu" else _DeviceReader
            readers = [make(work, self._device, self._settings.read_bytes) for _ in range(self._count(len(reads)))]
            threads = [threading.Thread(target=reader.run, name=f"read-{i}") for i, reader in enumerate(readers)]
            try:
                for thread in threads:
                    thread.start()
                for thread in threads:
                    while thread.is_alive():
                        report(work.num_bytes, total, time.perf_counter() - started)
                        thread.join(_REPORT_SECONDS)
            finally:
                work.stop()
                for thread in threads:
                    if thread.ident is not None:
                        thread.join()
            work.raise_error()
        streamed = Streamed(total, time.perf_counter() - started)
        report(total, total, streamed.seconds)
        return streamed

    def _count(self, num_reads: int) -> int:
        return min(self._settings.num_readers, num_reads)


class _Work:
    """The reads that readers take, one by one, and what they report. Thread-safe."""

    def __init__(self, reads: list[Read], files: dict[Path, int]) -> None:
        self._reads = iter(reads)
        self._files = files
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self.num_bytes = 0

    def taken(self) -> Iterator[Read]:
        """Yields reads until there are no more, or a reader has failed."""
        read = None
        while True:
            with self._lock:
                self.num_bytes += 0 if read is None else read.num_bytes
                read = next(self._reads, None)
            if read is None:
                return
            yield read

    def read(self, path: Path, start: int, target: memoryview) -> None:
        """Fills the target from a file."""
        done = 0
        while done < len(target):
            try:
                count = os.preadv(self._files[path], [target[done:]], start + done)
            except OSError as error:
                raise InvalidRequest(f"{path} cannot be read: {error.strerror}", field="model") from error
            if not count:
                raise InvalidRequest(
                    f"{path} ends before byte {start + len(target)}, which its header describes: it was changed",
                    field="model",
                )
            done += count

    def stop(self) -> None:
        """Ends the readers after their current read."""
        with self._lock:
            self._reads = iter(())

    def fail(self, error: BaseException) -> None:
        """Stops the readers. `raise_error` raises the first error."""
        with self._lock:
            self._error = self._error or error
        self.stop()

    def raise_error(self) -> None:
        if self._error is not None:
            raise self._error


class _Reader:
    """A thread that reads one range after the other."""

    def __init__(self, work: _Work, device: torch.device, read_bytes: int) -> None:
        self._work = work
        self._device = device
        self._read_bytes = read_bytes

    def run(self) -> None:
        try:
            with torch.inference_mode(), self._context():
                self._run()
        except BaseException as error:
            self._work.fail(error)

    def _context(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def _run(self) -> None:
        raise NotImplementedError


class _HostReader(_Reader):
    """Reads straight into the weights, and through a buffer those that are converted or laid out in another way."""

    def _run(self) -> None:
        buffer: memoryview | None = None
        for read in self._work.taken():
            if all(_is_direct(fill) for fill in read.fills):
                for fill in read.fills:
                    populate(fill.into)
                    self._work.read(read.path, fill.place.start, _bytes_of(fill.into))
                continue
            if buffer is None:
                buffer = _bytes_of(torch.empty(self._read_bytes, dtype=torch.uint8))
            self._work.read(read.path, read.start, buffer[: read.num_bytes])
            for fill in read.fills:
                for into, staged in _parts(fill.into, _staged(buffer, read, fill)):
                    populate(into)
                    into.copy_(staged)


class _DeviceReader(_Reader):
    """Reads into pinned buffers in turn. One is copied to the device, asynchronously, while the next is read."""

    def _context(self) -> AbstractContextManager[Any]:
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.default_stream(self._device))  # it may still use the memory's former content
        return torch.cuda.stream(stream)

    def _run(self) -> None:
        buffers: list[_PinnedBuffer] = []
        for turn, read in enumerate(self._work.taken()):
            if turn < _BUFFERS_PER_READER:
                buffers.append(_PinnedBuffer(self._read_bytes))
            buffer = buffers[turn % _BUFFERS_PER_READER]
            buffer.copied.synchronize()
            self._work.read(read.path, read.start, buffer.memory[: read.num_bytes])
            for fill in read.fills:
                _copy_to_device(_staged(buffer.memory, read, fill), fill.into)
            buffer.copied.record()
        torch.cuda.current_stream(self._device).synchronize()


class _PinnedBuffer:
    """Pinned memory, and the event behind its last copy to the device."""

    def __init__(self, num_bytes: int) -> None:
        self.memory = _bytes_of(torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True))
        self.copied: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]


def _parts(into: Tensor, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields parts of two tensors that stay in a core's cache, if they can be cut."""
    if not into.is_contiguous():
        yield into, values
        return
    target, source = into.view(-1), values.view(-1)
    for start in range(0, len(target), _PART_VALUES):
        yield target[start : start + _PART_VALUES], source[start : start + _PART_VALUES]


def _copy_to_device(staged: Tensor, into: Tensor) -> None:
    if staged.dtype == into.dtype and into.is_contiguous():
        into.copy_(staged, non_blocking=True)
    else:
        # The device converts and transposes; the host would do it in pageable memory.
        into.copy_(staged.to(into.device, non_blocking=True))


def _staged(buffer: memoryview, read: Read, fill: Fill) -> Tensor:
    """Returns the values of a fill in the buffer that holds its read."""
    coding, offset = fill.place.coding, fill.place.start - read.start
    if coding.decode is None:
        values = torch.frombuffer(buffer, dtype=coding.dtype, count=fill.into.numel(), offset=offset)
    else:
        values = coding.decode(torch.frombuffer(buffer, dtype=torch.uint8, count=fill.num_bytes, offset=offset))
    return values.view(fill.into.shape)


def _is_direct(fill: Fill) -> bool:
    coding = fill.place.coding
    return coding.decode is None and coding.dtype == fill.into.dtype and fill.into.is_contiguous()


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.as_strided((tensor.numel(),), (1,))  # a dimension of one element may have any stride
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


def _opened(path: Path, stack: ExitStack) -> int:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}", field="model") from error
    stack.callback(os.close, descriptor)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    return descriptor
