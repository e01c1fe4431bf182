"""Host memory for evicted blocks of a CUDA device.

Copies out: the compute stream gathers the blocks, all layers at once, to staging memory. So they are read after all
steps launched earlier and before all launched later, at the speed of device memory. A second stream copies them from
staging to pinned host memory, while steps run. Staging holds the blocks of one step; callers check `capacity` first, so
that nothing waits for it.

Copies in: a third stream copies pieces of megabytes to the device and scatters them to the pool, one after the other.
Steps do not wait for it, because no step reads the blocks before `poll` has returned them; it waits for steps only if
fenced. If nothing else runs, the next step is launched at once, and waits on the device.

A block is contiguous in host memory, and adjacent slots are one copy.
"""

from __future__ import annotations

import logging
import mmap
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.rpc.errors import InvalidRequest
from baton.worker.core import BlockId, HostSlot
from baton.worker.executors.base import LandedCopies, RestoreCopy
from baton.worker.executors.cuda.failures import raise_if_lost
from baton.worker.executors.cuda.kv.copies import KvCopies
from baton.worker.executors.cuda.kv.staging_ring import StagingRing, runs
from baton.worker.executors.host.cache import reserve_slots
from baton.worker.kv_spec import KvSpec

_log = logging.getLogger(__name__)

_MOST_STAGING_BYTES = 1 << 30
_PIECE_BYTES = 32 << 20  # of a restore
_POLL_SECONDS = 50e-6


@dataclass(slots=True)
class _Leaving:
    slots: list[HostSlot]
    began: torch.cuda.Event
    done: torch.cuda.Event


@dataclass(slots=True)
class _Arriving:
    restore_id: int
    num_blocks: int
    began: torch.cuda.Event
    done: torch.cuda.Event


class HostCache:
    """Implements HostCopies of executors.base. Created before the pool is sized, because staging is device memory."""

    def __init__(
        self,
        kv: KvCopies,
        spec: KvSpec,
        num_slots: int,
        tokens_per_step: int,
        device: torch.device,
        synchronize: Callable[[], None],
    ) -> None:
        size = spec.page_bytes
        staged = min(-(-tokens_per_step // spec.block_size), _MOST_STAGING_BYTES // size, num_slots)
        staged = max(1, staged, *map(spec.pages_each, spec.groups))  # the blocks of one state are copied together
        self.num_slots = num_slots
        self._kv = kv
        self._wait_for_device = synchronize
        self._ring = StagingRing(staged)
        self._piece = max(1, _PIECE_BYTES // size)
        self._staged = torch.empty(self._ring.size, size, dtype=torch.uint8, device=device)
        self._arrived = torch.empty(self._piece, size, dtype=torch.uint8, device=device)
        self._slots = _pinned(num_slots, size)
        self._out = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._in = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._leaving: deque[_Leaving] = deque()
        self._arriving: deque[_Arriving] = deque()
        self._hurried: deque[_Arriving] = deque()  # reported before they landed
        self._reported: list[tuple[int, float]] = []
        weakref.finalize(self, _unpin, self._slots.data_ptr())

    def capacity(self) -> int:
        """Returns the free blocks of staging memory."""
        return self._ring.num_free

    @torch.inference_mode()
    def offload(self, copies: Sequence[tuple[BlockId, HostSlot]]) -> None:
        """Queues copies to the host. Raises DeviceLost if the device is lost."""
        spans = self._ring.take(len(copies))
        try:
            self._offload(sorted(copies, key=lambda copy: copy[1]), spans)
        except Exception as error:
            raise_if_lost(error, self._wait_for_device)  # waits, so that no part continues
            self._ring.undo(len(copies))
            raise

    @torch.inference_mode()
    def restore(self, restore: RestoreCopy) -> None:
        """Queues copies from the host. Raises DeviceLost if the device is lost."""
        try:
            self._restore(restore)
        except Exception as error:
            raise_if_lost(error, self._wait_for_device)  # waits, so that no part continues
            raise

    def slot_bytes(self, slot: HostSlot) -> memoryview:
        return self._slots[slot].numpy().data

    def hurry(self) -> None:
        """Also delays other writers of the pool, because the blocks of a hurried copy may be freed before it lands."""
        if not self._arriving:
            return
        last = self._arriving[-1].done
        torch.cuda.current_stream().wait_event(last)
        self._kv.after = last
        self._reported += [(arriving.restore_id, 0.0) for arriving in self._arriving]
        self._hurried += self._arriving
        self._arriving.clear()

    def poll(self) -> LandedCopies:
        """Returns the copies that have landed since the last call. Raises DeviceLost if the device is lost."""
        landed = LandedCopies(restores=self._reported)
        self._reported = []
        try:
            while self._hurried and self._hurried[0].done.query():  # type: ignore[no-untyped-call]
                hurried = self._hurried.popleft()
                landed.timed.append((hurried.num_blocks, _seconds(hurried)))
            while self._leaving and self._leaving[0].done.query():  # type: ignore[no-untyped-call]
                leaving = self._leaving.popleft()
                self._ring.put_back(len(leaving.slots))
                landed.slots += leaving.slots
                landed.offload_seconds += _seconds(leaving)
            while self._arriving and self._arriving[0].done.query():  # type: ignore[no-untyped-call]
                arriving = self._arriving.popleft()
                landed.restores.append((arriving.restore_id, _seconds(arriving)))
        except Exception as error:
            raise_if_lost(error, self._wait_for_device)
            raise
        return landed

    def wait(self, seconds: float) -> None:
        """Waits until a restore has landed, or for `seconds`."""
        until = time.perf_counter() + seconds
        while self._arriving and not self._arriving[0].done.query():  # type: ignore[no-untyped-call]
            if time.perf_counter() >= until:
                return
            time.sleep(_POLL_SECONDS)

    def _offload(self, copies: Sequence[tuple[BlockId, HostSlot]], spans: Sequence[tuple[int, int]]) -> None:
        block_ids = [block_id for block_id, _ in copies]
        slots = [slot for _, slot in copies]
        start = 0
        for first, count in spans:
            staged = self._staged[first : first + count]
            self._kv.gather_pages(block_ids[start : start + count], staged.view(-1))
            start += count
        self._out.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._out):
            began = _record()
            start = 0
            for first, count in spans:
                for offset, slot, length in runs(slots[start : start + count]):
                    staged = self._staged[first + offset : first + offset + length]
                    self._slots[slot : slot + length].copy_(staged, non_blocking=True)
                start += count
            self._leaving.append(_Leaving(slots, began, _record()))

    def _restore(self, restore: RestoreCopy) -> None:
        copies = sorted(restore.copies)
        if restore.fenced:
            self._in.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._in):
            began = _record()
            for piece in _pieces(copies, self._piece):
                for offset, slot, length in runs([slot for slot, _ in piece]):
                    arrived = self._arrived[offset : offset + length]
                    arrived.copy_(self._slots[slot : slot + length], non_blocking=True)
                block_ids = [block_id for _, block_id in piece]
                self._kv.scatter_pages(block_ids, self._arrived[: len(piece)].view(-1))
            self._arriving.append(_Arriving(restore.restore_id, len(copies), began, _record()))


def _pieces(copies: Sequence[tuple[HostSlot, BlockId]], most: int) -> Iterator[Sequence[tuple[HostSlot, BlockId]]]:
    for first in range(0, len(copies), most):
        yield copies[first : first + most]


def _record() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _seconds(copy: _Leaving | _Arriving) -> float:
    return float(copy.began.elapsed_time(copy.done)) / 1000


def _unpin(address: int) -> None:
    """Unpins memory before it is freed, so that it can be pinned again."""
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


def _pinned(num_slots: int, bytes_per_block: int) -> Tensor:
    """Reserves pinned memory [num_slots, bytes_per_block] uint8. Raises InvalidRequest."""
    pages = reserve_slots(num_slots, bytes_per_block)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            pages.madvise(mmap.MADV_HUGEPAGE)  # the time to pin depends on the number of pages
        except OSError as error:
            _log.debug("host memory has no huge pages: %s", error)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    # Not PyTorch's pinned memory, which rounds up to a power of two.
    code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))  # type: ignore[no-untyped-call]
    if code:
        raise InvalidRequest(
            f"{memory.numel() / 1e9:.1f} GB of host memory cannot be pinned (CUDA error {code}): lower host_cache_gb",
            field="host_cache_gb",
        )
    return memory.view(num_slots, bytes_per_block)
