"""Transfers that peers may write, and who is writing now. Every kind of transport asks here before it touches a block.

Whoever writes enters first and leaves after; a fence closes a transfer, and is done when the last writer has left.
"""

from __future__ import annotations

import threading

from baton.rpc.errors import DataLoss
from baton.worker.kv_spec import KvSpec
from baton.worker.transfer.base import Inbound, InboundFailed, InboundFenced, Landed
from baton.worker.transfer.event_queue import EventQueue
from baton.worker.transfer.receive.coverage import Coverage, Grid, Part
from baton.worker.transfer.wire.frames import PieceHeader


class OpenTransfer:
    """One inbound transfer, shared by the engine thread and whoever writes; guarded by `lock`."""

    def __init__(self, inbound: Inbound, coverage: Coverage) -> None:
        self.inbound = inbound
        self.coverage = coverage
        self.num_bytes = 0
        self.num_writers = 0
        self.closed = False
        self.fencing = False  # someone waits for the last writer
        self.lock = threading.Lock()


class OpenTransfers:
    """All that are open."""

    def __init__(self, spec: KvSpec, events: EventQueue) -> None:
        self._spec = spec
        self._num_heads = [spec.num_rank_heads(group) for group in spec.groups]
        self._block_bytes = [spec.bytes_per_block_layer(group) for group in spec.groups]
        self._events = events
        self._open: dict[int, OpenTransfer] = {}

    def open(self, inbound: Inbound) -> None:
        """Pieces of this transfer may be written from now on."""
        grids = [
            Grid(layers, len(block_ids), num_heads)
            for layers, block_ids, num_heads in zip(self._spec.spans, inbound.tables, self._num_heads, strict=True)
        ]
        self._open[inbound.transfer_id] = OpenTransfer(inbound, Coverage(grids))

    def is_open(self, transfer_id: int) -> bool:
        """It has neither landed nor been fenced."""
        return transfer_id in self._open

    def num_landed_bytes(self, transfer_id: int) -> int:
        """0 for a transfer that is not open."""
        transfer = self._open.get(transfer_id)
        return transfer.num_bytes if transfer is not None else 0

    def fence(self, transfer_id: int) -> None:
        """InboundFenced follows: at once, or when the last writer has left."""
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
        """Tells of an open transfer's end, once. Writes stop; whoever writes now is waited for by the fence."""
        transfer = self._open.get(transfer_id)
        if transfer is None:
            return
        with transfer.lock:
            if transfer.closed:
                return
            transfer.closed = True
        self._events.post(InboundFailed(transfer_id, reason, corrupt))

    # Writers.

    def find(self, header: PieceHeader) -> OpenTransfer | None:
        """The transfer that a piece shows the stamp of."""
        transfer = self._open.get(header.transfer_id)
        if transfer is None:
            return None
        inbound = transfer.inbound
        known = header.generation == inbound.generation and header.receiver_epoch == inbound.receiver_epoch
        return transfer if known else None

    def problem(self, transfer: OpenTransfer, header: PieceHeader) -> str:
        """What is wrong with a header, whatever its bytes are. Empty: nothing."""
        group = self._spec.group_of(header.layer)
        block_bytes, rank_heads = self._block_bytes[group], self._num_heads[group]
        num_heads = rank_heads if header.heads is None else header.heads[1]
        expected = header.num_blocks * header.num_layers * (block_bytes * num_heads // rank_heads)
        if header.num_bytes != expected:
            return f"a piece of {header.num_blocks} blocks has {header.num_bytes} bytes, expected {expected}"
        if transfer.inbound.checksum and header.checksum is None:
            return "checksums were asked for, a piece came without"
        return ""

    def claim(self, transfer: OpenTransfer, header: PieceHeader) -> Part:
        """What of the transfer the piece covers. Raises DataLoss where it lies outside, or over another."""
        coverage = transfer.coverage
        part = coverage.part(
            header.layer, header.num_layers, header.first_index, header.num_blocks, self._heads_of(header)
        )
        with transfer.lock:
            if not transfer.closed:
                coverage.claim(part)
        return part

    def enter(self, transfer: OpenTransfer) -> bool:
        """Whether blocks may be written now. If so, leave after."""
        with transfer.lock:
            if transfer.closed:
                return False
            transfer.num_writers += 1
            return True

    def leave(self, transfer: OpenTransfer, num_bytes: int, landed: Part | None) -> None:
        """A writer is done; the last one tells whoever waits for that. `landed`: a piece that is complete now."""
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
            raise DataLoss(f"a piece of KV heads {header.heads} came; this rank has {num_heads}")
        return header.heads
