"""Raw reads of files by several threads, into reused buffers: the floor of a load. Knows nothing of weights."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from baton.worker.weights.stream.streaming import StreamSettings

Reads = Iterator[tuple[int, int]]  # file descriptors and byte offsets


def read_to_host(paths: Sequence[Path], settings: StreamSettings, direct: bool) -> None:
    """Reads the files into one buffer a reader, several files by turns. `direct`: past the page cache."""

    def run(reads: Reads) -> None:
        buffer = mmap.mmap(-1, settings.read_bytes)
        for file, start in reads:
            os.preadv(file, [buffer], start)

    _read(paths, settings, direct, [run] * settings.num_readers)


class DeviceReads:
    """Reads files into pinned buffers, and copies each to one place on a GPU while the next is read."""

    def __init__(self, device: torch.device, settings: StreamSettings) -> None:
        self._device = device
        self._settings = settings
        self._pinned = [
            [torch.empty(settings.read_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
            for _ in range(settings.num_readers)
        ]
        self._places = [torch.empty_like(buffers[0], device=device) for buffers in self._pinned]

    def __call__(self, paths: Sequence[Path], direct: bool) -> None:
        """Reads the files, and returns when their bytes have been on the device. `direct`: past the page cache."""
        runs = [partial(self._run, buffers, place) for buffers, place in zip(self._pinned, self._places, strict=True)]
        _read(paths, self._settings, direct, runs)

    def copy(self, num_bytes: int) -> None:
        """Copies this many bytes to the device, without a read."""
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            for turn in range(-(-num_bytes // self._settings.read_bytes)):
                index = turn % len(self._pinned)
                self._places[index].copy_(self._pinned[index][0], non_blocking=True)
            stream.synchronize()

    def _run(self, buffers: Sequence[Tensor], place: Tensor, reads: Reads) -> None:
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        copied = [torch.cuda.Event() for _ in buffers]  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            for turn, (file, start) in enumerate(reads):
                index = turn % len(buffers)
                copied[index].synchronize()
                count = os.preadv(file, [buffers[index].numpy().data], start)
                place[:count].copy_(buffers[index][:count], non_blocking=True)
                copied[index].record()
            stream.synchronize()


def drop_pages(paths: Sequence[Path]) -> None:
    """Drops the files' pages from the page cache."""
    with _opened(paths, direct=False) as files:
        for file in files:
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


def _read(
    paths: Sequence[Path], settings: StreamSettings, direct: bool, runs: Sequence[Callable[[Reads], None]]
) -> None:
    with _opened(paths, direct) as files:
        sizes = [path.stat().st_size for path in paths]
        starts = range(0, max(sizes), settings.read_bytes)
        reads = iter([(files[i], start) for start in starts for i in range(len(files)) if start < sizes[i]])
        lock = threading.Lock()

        def taken() -> Reads:
            while True:
                with lock:
                    read = next(reads, None)
                if read is None:
                    return
                yield read

        threads = [threading.Thread(target=run, args=(taken(),)) for run in runs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


@contextmanager
def _opened(paths: Sequence[Path], direct: bool) -> Iterator[list[int]]:
    flags = os.O_RDONLY | (os.O_DIRECT if direct else 0)
    files = [os.open(path, flags) for path in paths]
    try:
        yield files
    finally:
        for file in files:
            os.close(file)
