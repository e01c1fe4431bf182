"""Blocks on disk below host memory: threads write and read their files, while the engine runs steps.

One thread writes and removes, in the order in which that was asked for, so that a removal never meets a later write of
the same block. Others read. What they have done is seen by `poll`, on the engine's thread, which alone has the index.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from baton.rpc.errors import DataLoss
from baton.worker.core import BlockHash
from baton.worker.kv.disk_tier.folder import BlockFolder, Buffers
from baton.worker.kv.disk_tier.index import DiskIndex

_log = logging.getLogger(__name__)

_READERS = 4


@dataclass(slots=True)
class DiskCounters:
    """Totals since the start of the worker."""

    num_written_blocks: int = 0
    num_written_bytes: int = 0
    num_loaded_blocks: int = 0
    num_loaded_bytes: int = 0
    load_seconds: float = 0.0  # of all readers together
    num_dropped_blocks: int = 0  # left host memory before they were written, or had no room
    num_damaged_files: int = 0  # torn, or with another checksum or block than their name says
    num_foreign_files: int = 0  # in the folder, and not of this worker's blocks; they are left alone
    num_failed_files: int = 0  # that the system could not read or write


@dataclass(frozen=True, slots=True)
class Ended:
    """A file that was written or read."""

    key: BlockHash
    is_read: bool
    succeeded: bool
    generation: int
    num_bytes: int
    seconds: float
    damaged: bool = False  # the file was not the block, whole
    failed: bool = False  # the system could not read or write it


class DiskTier:
    """The files, their index and the threads. All methods are for the engine's thread."""

    def __init__(self, folder: BlockFolder, capacity: int, layout: Callable[[], bytes]) -> None:
        """`capacity`: bytes of all files. What the folder holds of this layout is found again.

        `layout`: returns that of the weights in use, for the headers of files.
        """
        self.folder = folder
        self._layout = layout
        self.counters = DiskCounters()
        found = folder.find()
        self.counters.num_foreign_files = found.num_foreign
        self.counters.num_damaged_files = found.num_torn
        self.index = DiskIndex(capacity, found.sizes)
        self._generation = 0  # of the cache: what was begun in an earlier one is not kept
        self._ended: queue.SimpleQueue[Ended] = queue.SimpleQueue()
        self._waiting: list[Ended] = []  # taken by `wait`
        self._writer = ThreadPoolExecutor(1, "disk-write")
        self._readers = ThreadPoolExecutor(_READERS, "disk-read")
        self._remove(self.index.shrink())

    @property
    def generation(self) -> int:
        """Which cache blocks belong to; grows with every reset."""
        return self._generation

    def begin_write(self, key: BlockHash, slots: Buffers) -> bool:
        """Begins to write a block, whose slots do not change until it ended or a reset. False: there is no room."""
        evicted = self.index.begin(key, self.folder.size_of(len(slots)))
        if evicted is None:
            return False
        self._remove(evicted)
        self.folder.layout = self._layout()
        self._writer.submit(self._run, self._write, key, slots, self._generation, False)
        return True

    def begin_read(self, key: BlockHash, slots: Buffers) -> None:
        """Begins to fill slots with a block of the index."""
        self.index.touch(key)
        self.folder.layout = self._layout()
        self._readers.submit(self._run, self._read, key, slots, self._generation, True)

    def poll(self) -> list[Ended]:
        """Returns the writes and reads that ended since the last call, and counts them."""
        ended, self._waiting = self._waiting, []
        while True:
            try:
                ended.append(self._ended.get_nowait())
            except queue.Empty:
                break
        for one in ended:
            self._count(one)
        return ended

    def wait(self, seconds: float) -> None:
        """Waits until something ended, or for `seconds`."""
        try:
            self._waiting.append(self._ended.get(timeout=seconds))
        except queue.Empty:
            return

    def reset(self) -> None:
        """Forgets all blocks and removes their files."""
        self._generation += 1
        self._remove(self.index.reset())

    def close(self) -> None:
        """Ends what is in progress, and lets another worker have the folder."""
        self._readers.shutdown(cancel_futures=True)
        self._writer.shutdown()
        self.folder.close()

    def _count(self, ended: Ended) -> None:
        counters = self.counters
        counters.num_damaged_files += ended.damaged
        counters.num_failed_files += ended.failed
        current = ended.generation == self._generation
        if not ended.is_read:
            if current:
                self.index.end(ended.key, succeeded=ended.succeeded)
            counters.num_written_blocks += ended.succeeded
            counters.num_written_bytes += ended.num_bytes if ended.succeeded else 0
        elif ended.succeeded:
            counters.num_loaded_blocks += 1
            counters.num_loaded_bytes += ended.num_bytes
            counters.load_seconds += ended.seconds
        elif current and self.index.lose(ended.key):
            self._remove([ended.key])

    def _remove(self, keys: Sequence[BlockHash]) -> None:
        if keys:
            self._writer.submit(self.folder.remove, keys)

    # On threads.

    def _run(
        self,
        job: Callable[[BlockHash, Buffers, int], bool],
        key: BlockHash,
        slots: Buffers,
        generation: int,
        is_read: bool,
    ) -> None:
        started, succeeded, damaged, failed = time.perf_counter(), False, False, False
        try:
            succeeded = job(key, slots, generation)
        except DataLoss as error:
            damaged = True
            _log.warning("%s; its block is computed again", error.message)
        except FileNotFoundError:
            _log.debug("the file of block %s is gone", key.hex())
        except OSError as error:
            failed = True
            _log.warning("block %s: %s", key.hex(), error)
        finally:
            num_bytes, seconds = sum(map(len, slots)), time.perf_counter() - started
            self._ended.put(Ended(key, is_read, succeeded, generation, num_bytes, seconds, damaged, failed))

    def _write(self, key: BlockHash, slots: Buffers, generation: int) -> bool:
        written = self.folder.write(key, slots)
        # After a reset the slots may have changed while they were read.
        if generation != self._generation:
            self.folder.drop(written)
            return False
        self.folder.publish(written)
        return True

    def _read(self, key: BlockHash, slots: Buffers, generation: int) -> bool:
        self.folder.read(key, slots)
        return True
