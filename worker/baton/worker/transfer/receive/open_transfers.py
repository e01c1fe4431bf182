"""The open transfers of this receiver, and the writers in them. Every transport asks here before it writes a block.

A writer enters a transfer before it writes and leaves it afterwards. A fence closes the transfer, and is complete when
the last writer has left.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from baton.rpc.errors import DataLoss
from baton.worker.core import BlockId
from baton.worker.kv_spec import KvSpec
from baton.worker.transfer.base import Inbound, InboundFailed, InboundFenced, Landed
from baton.worker.transfer.event_queue import EventQueue
from baton.worker.transfer.receive.coverage import Coverage, Grid, Part
from baton.worker.transfer.wire.frames import PieceHeader


class OpenTransfer:
    """One inbound transfer, shared by the engine thread and its writers. `lock` guards it."""

    def __init__(self, inbound: Inbound, coverage: Coverage, pages: Sequence[int]) -> None:
        self.inbound = inbound
        self._pages = pages  # of a block in each group
        self.coverage = coverage
        self.num_bytes = 0
        self.num_writers = 0
        self.closed = False
        self.fencing = False  # a fence waits for the last writer
        self.lock = threading.Lock()

    def block_ids(self, part: Part) -> tuple[BlockId, ...]:
        """Returns the receiver's blocks that a part covers; of states, their pages."""
        each = self._pages[part.group]
        return self.inbound.tables[part.group][part.blocks.start * each : part.blocks.stop * each]


class OpenTransfers:
    """All open transfers of this receiver."""

    def __init__(self, spec: KvSpec, events: EventQueue) -> None:
        self._spec = spec
        self._num_heads = [spec.num_rank_heads(group) for group in spec.groups]
        self._block_bytes = [spec.bytes_per_block_layer(group) for group in spec.groups]
        self._pages = [spec.pages_each(group) for group in spec.groups]
        self._events = events
        self._open: dict[int, OpenTransfer] = {}

    def open(self, inbound: Inbound) -> None:
        """Accepts pieces of this transfer from now on."""
        grids = [
            Grid(layers, len(block_ids) // pages, num_heads)
            for layers, block_ids, pages, num_heads in zip(
                self._spec.spans, inbound.tables, self._pages, self._num_heads, strict=True
            )
        ]
        self._open[inbound.transfer_id] = OpenTransfer(inbound, Coverage(grids), self._pages)

    def is_open(self, transfer_id: int) -> bool:
        """Returns whether the transfer has neither landed nor been fenced."""
        return transfer_id in self._open

    def num_landed_bytes(self, transfer_id: int) -> int:
        """Returns the bytes of a transfer that have landed; 0 if it is not open."""
        transfer = self._open.get(transfer_id)
        return transfer.num_bytes if transfer is not None else 0

    def fence(self, transfer_id: int) -> None:
        """Closes a transfer. InboundFenced follows at once, or when the last writer has left."""
        transfer = self._open.pop(transfer_id, None)
        if transfer is None:
            self._events.post(InboundFenced(transfer_id))
            return
        with transfer.lock:
            transfer.closed = transfer.fencing = True
            done = transfer.num_writers == 0
        if done:
            self._events.post(InboundFenced(transfer_id))

    def fail(self, transfer_id: int, reason: str, corrupt: bool = False) -> None:
        """Closes an open transfer to new writers and reports its failure once.

        A fence still waits for current writers.
        """
        transfer = self._open.get(transfer_id)
        if transfer is None:
            return
        with transfer.lock:
            if transfer.closed:
                return
            transfer.closed = True
        self._events.post(InboundFailed(transfer_id, reason, corrupt))

    # For writers.

    def find(self, header: PieceHeader) -> OpenTransfer | None:
        """Returns the open transfer whose generation and epoch a piece carries."""
        transfer = self._open.get(header.transfer_id)
        if transfer is None:
            return None
        inbound = transfer.inbound
        known = header.generation == inbound.generation and header.receiver_epoch == inbound.receiver_epoch
        return transfer if known else None

    def problem(self, transfer: OpenTransfer, header: PieceHeader) -> str:
        """Returns what is wrong with a header, regardless of its bytes. Empty: nothing."""
        group = self._spec.group_of(header.layer)
        block_bytes, rank_heads = self._block_bytes[group], self._num_heads[group]
        num_heads = rank_heads if header.heads is None else header.heads[1]
        expected = header.num_blocks * header.num_layers * (block_bytes * num_heads // rank_heads)
        if header.num_bytes != expected:
            return f"a piece of {header.num_blocks} blocks has {header.num_bytes} bytes, expected {expected}"
        if transfer.inbound.checksum and header.checksum is None:
            return "a piece has no checksum; this transfer requires checksums"
        return ""

    def claim(self, transfer: OpenTransfer, header: PieceHeader) -> Part:
        """Claims the part that a piece covers. Raises DataLoss if it is out of range or overlaps another."""
        coverage = transfer.coverage
        part = coverage.part(
            header.layer, header.num_layers, header.first_index, header.num_blocks, self._heads_of(header)
        )
        with transfer.lock:
            if not transfer.closed:
                coverage.claim(part)
        return part

    def enter(self, transfer: OpenTransfer) -> bool:
        """Returns whether blocks may be written now. If so, `leave` must follow."""
        with transfer.lock:
            if transfer.closed:
                return False
            transfer.num_writers += 1
            return True

    def leave(self, transfer: OpenTransfer, num_bytes: int, landed: Part | None) -> None:
        """Ends a write; the last writer reports a waiting fence. `landed`: the piece that is now complete."""
        with transfer.lock:
            transfer.num_writers -= 1
            transfer.num_bytes += num_bytes
            if landed is not None:
                transfer.coverage.land(landed)
            complete = transfer.coverage.complete and not transfer.closed
            transfer.closed = transfer.closed or complete
            fenced = transfer.fencing and transfer.num_writers == 0
        transfer_id = transfer.inbound.transfer_id
        if complete:
            self._open.pop(transfer_id, None)
            self._events.post(Landed(transfer_id, transfer.coverage.num_pieces, transfer.num_bytes))
        elif fenced:
            self._events.post(InboundFenced(transfer_id))

    def _heads_of(self, header: PieceHeader) -> tuple[int, int] | None:
        num_heads = self._num_heads[self._spec.group_of(header.layer)]
        if header.heads is not None and header.heads[0] + header.heads[1] > num_heads:
            raise DataLoss(f"a piece covers KV heads {header.heads} (first, number); this rank has {num_heads}")
        return header.heads
