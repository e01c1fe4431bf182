"""One sender's connection at the receiver: greets it, and writes the pieces that it announces into their blocks.

Bytes of a transfer that is not open, or that do not carry its generation and epoch, are drained and never written.
"""

from __future__ import annotations

import hmac
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from baton.rpc.errors import DataLoss, InternalError, PermissionDenied, ServiceError, Unsupported
from baton.worker.core import BlockId
from baton.worker.executor.base import Executor
from baton.worker.transfer.blocks import block_views, write_piece
from baton.worker.transfer.bulk import BulkPath, BulkReceiver, Slots, Ticket
from baton.worker.transfer.checksum import checksum_of
from baton.worker.transfer.coverage import Part
from baton.worker.transfer.frames import (
    PIECE_BYTES,
    Open,
    PieceHeader,
    decode_piece,
    encode_credit,
    encode_refused,
    encode_welcome,
)
from baton.worker.transfer.greetings import receive_open
from baton.worker.transfer.inbound import InboundTransfers, Involved, OpenTransfer
from baton.worker.transfer.kinds import name_of
from baton.worker.transfer.room import with_room
from baton.worker.transfer.scatter import receive_into
from baton.worker.transfer.sockets import Connection, keep_alive, limit_receives, readable, shut_down
from baton.worker.transfer.stuck import watch
from baton.worker.transfer.tls_socket import KvTls
from baton.worker.transfer.totals import Totals

_log = logging.getLogger(__name__)

_GREETING_SECONDS = 5.0
_BODY_SECONDS = 30.0  # without a byte of a piece that has begun
_IDLE_PERIODS = 20  # of _BODY_SECONDS without a piece, until a connection is closed
_SCRATCH_BYTES = 1 << 20
_WRITE_SECONDS = 5.0  # for a piece that was announced, until it is in its blocks
_STUCK_SECONDS = 15.0  # that the thread may be away from its pieces: longer than it waits for any of them
_GONE_SECONDS = 0.25  # for the same, once the sender's end is closed: what it had started has ended, or never will
_SPIN_SECONDS = 500e-6  # that a piece takes at most while it moves well
_NAP_SECONDS = 20e-6


@dataclass(frozen=True, slots=True)
class _Writing:
    """A piece on its way from a slot into blocks."""

    slot: int
    header: PieceHeader
    transfer: OpenTransfer
    part: Part
    ticket: Ticket
    began: float


class Receiving:
    """A sender's connection. `run` belongs to its thread, `cut` to any."""

    def __init__(
        self,
        sock: Connection,
        peer: str,
        key: bytes,
        executor: Executor,
        transfers: InboundTransfers,
        paths: Mapping[str, BulkPath | None],
        totals: Totals,
        make_room: Callable[[str], bool],
        tls: KvTls | None = None,
    ) -> None:
        self._sock = sock
        self._tls = tls
        self._peer = peer
        self._key = key
        self._executor = executor
        self._transfers = transfers
        self._paths = paths
        self._make_room = make_room  # by asking another connection of this kind to go
        self._all_totals = totals
        self._totals = totals.of("tcp")  # until the sender said what it is
        self._kind = ""
        self._bulk: BulkReceiver | None = None
        self._slots = Slots(0, 0, b"")
        self._involved = Involved(transfers)
        self._staging = bytearray()
        self._busy: set[int] = set()  # slots that are not the sender's
        self._writing: deque[_Writing] = deque()  # out of them
        self._written_at = 0.0  # when the last piece was in its blocks
        self._moved_at = 0.0  # when the last piece was announced, or was in its blocks; before any, the welcome
        self._turned_at = 0.0  # when its thread last saw to pieces that are on their way; 0: there are none
        self._over = threading.Event()
        self._sender_closed = False
        self._retired = False
        self._cut = False

    def idle_since(self, kind: str) -> float | None:
        """When a piece last came. None: more are to come, it was asked to go, or it is of another kind."""
        if kind != self._kind or self._retired or self._busy or self._involved.any_open():
            return None
        return self._moved_at

    def retire(self) -> None:
        """Asks the sender to close its end."""
        self._retired = True
        _log.info("the KV connection of %s was not used for longest, and makes room for another", self._peer)
        shut_down(self._sock, socket.SHUT_WR)

    def cut(self) -> None:
        """Wakes its thread, for the last time."""
        self._cut = True
        if self._bulk is not None:
            self._bulk.abort()
        shut_down(self._sock)

    def run(self) -> None:
        """Until the sender's end is closed, or it is cut."""
        reason = "the connection ended"
        try:
            keep_alive(self._sock)
            limit_receives(self._sock, _GREETING_SECONDS)
            self._secure()
            if self._greet():
                limit_receives(self._sock, _BODY_SECONDS)
                self._receive_pieces()
        except DataLoss as error:
            reason = error.message
            self._totals.bad_connection()
            _log.warning("KV connection of %s dropped: %s", self._peer, reason)
        except OSError as error:
            reason = f"the connection broke: {error}"
        except Exception as error:  # of the executor: the thread must not die in silence
            reason = f"pieces could not be written: {error}"
            _log.exception("KV connection of %s failed", self._peer)
        finally:
            self._over.set()
            if self._bulk is not None:
                self._bulk.abort()
            self._settle_writes()
            self._involved.fail(f"{self._peer}: {reason}")
            self._end()

    # Greeting.

    def _secure(self) -> None:
        """Goes on over TLS where this worker does. Raises DataLoss for a peer that does not, or shows nothing good."""
        if self._tls is None:
            return
        assert isinstance(self._sock, socket.socket), "it is not secured yet"
        try:
            self._sock = self._tls.accept(self._sock, _GREETING_SECONDS)
        except OSError as error:
            raise DataLoss(f"the TLS handshake failed: {error}") from error

    def _greet(self) -> bool:
        """Whether the sender is served. Raises DataLoss for one that speaks something else."""
        opened = receive_open(self._sock)
        name = name_of(opened.kind)
        try:
            self._check_key(opened)
            if name not in self._paths:
                raise Unsupported(f"this worker takes no KV over {name}; it takes {', '.join(self._paths)}")
            self._totals = self._all_totals.of(name)
            self._accept(name, opened)
            self._moved_at = time.monotonic()
            self._kind = name
        except ServiceError as error:
            self._totals.refused()
            _log.warning("KV connection of %s over %s refused: %s", self._peer, name, error.message)
            self._sock.sendall(encode_refused(error))
            return False
        self._sock.sendall(encode_welcome(self._slots))
        return True

    def _check_key(self, opened: Open) -> None:
        """Before anything that the sender offers is looked at. Raises PermissionDenied."""
        if self._tls is not None and (problem := self._tls.refusal(self._sock)):
            self._totals.stranger()
            raise PermissionDenied(f"no KV is taken of this peer: {problem}")
        if not hmac.compare_digest(opened.key, self._key):
            self._totals.stranger()
            raise PermissionDenied("the connection does not show the key that this receiver tells over control streams")

    def _accept(self, name: str, opened: Open) -> None:
        path = self._paths[name]
        if path is None:
            return
        try:
            self._bulk = with_room(lambda: path.accept(opened.offer), lambda: self._make_room(name))
        except ServiceError:
            raise
        except Exception as error:  # of a library: the sender must hear of it
            _log.exception("slots for %s could not be made", self._peer)
            raise InternalError(f"slots for {name} could not be made: {error}") from error
        self._slots = self._bulk.slots
        watch(self._sock, self._peer, self._over, lambda: self._turned_at, _STUCK_SECONDS, self._bulk.abort)

    # Pieces.

    def _receive_header(self) -> PieceHeader | None:
        """None: the peer ended the connection between two pieces, or was idle for long."""
        data = bytearray(PIECE_BYTES)
        view = memoryview(data)
        num_idle = 0
        while view:
            try:
                count = self._sock.recv_into(view, 0, socket.MSG_WAITALL)
            except BlockingIOError:
                num_idle += 1
                if len(view) < PIECE_BYTES:
                    raise DataLoss("a piece's header did not come to its end") from None
                if num_idle >= _IDLE_PERIODS:
                    return None
                continue
            if count == 0:
                self._sender_closed = True
                if len(view) < PIECE_BYTES:
                    raise ConnectionError("it ended within a header")
                return None
            view = view[count:]
        return decode_piece(data)

    def _receive_pieces(self) -> None:
        """Until the sender has no more."""
        if self._bulk is not None:
            self._receive_slots(self._bulk)
            return
        while (header := self._receive_header()) is not None:
            self._receive_piece(header)

    def _receive_slots(self, bulk: BulkReceiver) -> None:
        """Hears of pieces as they are announced, and takes and writes them meanwhile, in order."""
        announced: deque[tuple[int, PieceHeader]] = deque()
        writing = self._writing
        ended = False
        while announced or writing or not ended:
            self._turned_at = time.monotonic() if announced or writing else 0.0
            if writing and _is_over(writing[0].ticket):  # first: the sender may wait for its slot
                self._finish_write(writing.popleft())
            elif not ended and (not (announced or writing) or readable(self._sock, 0)):
                header = self._receive_header()
                ended = header is None
                if header is not None:
                    slot = self._announced(bulk, header)
                    if bulk.writes_ahead and header.checksum is None and not announced:
                        self._begin_write(bulk, slot, header)
                    else:
                        announced.append((slot, header))
            elif announced:
                self._begin_write(bulk, *announced.popleft())
            else:
                self._nap(_GONE_SECONDS if ended else _WRITE_SECONDS)

    def _nap(self, limit: float) -> None:
        """Not in the device's own wait: the sender's end must be seen. Raises ConnectionError where nothing moves."""
        still = time.monotonic() - self._moved_at
        if still >= limit:
            raise ConnectionError(f"a piece that was announced did not come in {limit:g} s")
        if still < _SPIN_SECONDS:
            os.sched_yield()  # a sleep of no time takes tens of microseconds
        else:
            time.sleep(_NAP_SECONDS)

    def _announced(self, bulk: BulkReceiver, header: PieceHeader) -> int:
        """The slot that the piece comes into."""
        self._turned_at = time.monotonic()
        slot = self._slot_of(header)
        self._busy.add(slot)
        if self._transfers.find(header) is not None:
            self._involved.add(header.transfer_id)
        bulk.announced(slot, header.num_bytes)
        self._moved_at = time.monotonic()
        return slot

    def _receive_piece(self, header: PieceHeader) -> None:
        if header.slot is not None:
            raise DataLoss(f"a piece in slot {header.slot} came; a connection without slots has none")
        transfer = self._transfers.find(header)
        direct = header.checksum is None and header.heads is None and self._executor.kv_bytes is not None
        if transfer is not None and direct:
            self._receive_direct(transfer, header)
        else:
            self._receive_staged(header)

    def _receive_direct(self, transfer: OpenTransfer, header: PieceHeader) -> None:
        """From the socket into the blocks."""
        part = self._claim(transfer, header)
        began = time.monotonic()
        left = header.num_bytes
        if part is not None:
            kv_bytes = self._executor.kv_bytes
            assert kv_bytes is not None, "asked before"
            views = block_views(kv_bytes, part.layers, _ids(transfer, part))
            left -= receive_into(
                self._sock,
                views,
                self._transfers,
                transfer,
                part,
                lambda: self._totals.received(header.num_bytes, time.monotonic() - began),
                _BODY_SECONDS,
            )
        if left:
            self._drain(left)
            if part is not None:
                self._totals.stray()

    def _receive_staged(self, header: PieceHeader) -> None:
        """From the socket into memory of our own, to be looked at first."""
        began = time.monotonic()
        if len(self._staging) < header.num_bytes:
            self._staging = bytearray(header.num_bytes)
        body = memoryview(self._staging)[: header.num_bytes]
        self._fill(body)
        seconds = time.monotonic() - began
        executor = self._executor
        self._store(
            header,
            lambda: checksum_of(body),
            lambda transfer, part: write_piece(executor, body, part.layers, _ids(transfer, part), header.heads),
            lambda: seconds,
        )

    def _slot_of(self, header: PieceHeader) -> int:
        slot = header.slot
        if slot is None or slot >= self._slots.num_slots or header.num_bytes > self._slots.slot_bytes:
            raise DataLoss(
                f"a piece of {header.num_bytes} bytes in slot {slot} came; the sender has {self._slots.num_slots} "
                f"slots of {self._slots.slot_bytes} bytes"
            )
        if slot in self._busy:
            raise DataLoss(f"a piece in slot {slot} came, which was not given back")
        return slot

    def _begin_write(self, bulk: BulkReceiver, slot: int, header: PieceHeader) -> None:
        """From the slot into the blocks."""
        began = time.monotonic()
        if header.checksum is not None or not bulk.writes_ahead:
            bulk.take(slot, header.num_bytes)
        admitted = self._admit(header, lambda: bulk.checksum(slot, header.num_bytes))
        if admitted is not None:
            transfer, part = admitted
            try:
                ticket = bulk.write(slot, part.layers, _ids(transfer, part), header.heads)
            except Exception as error:
                self._spoiled(transfer, error)
            else:
                self._writing.append(_Writing(slot, header, transfer, part, ticket, began))
                return
        self._give_back(slot)

    def _finish_write(self, writing: _Writing) -> None:
        """Then the slot is the sender's again."""
        header = writing.header
        try:
            if not writing.ticket.wait(_WRITE_SECONDS):
                raise InternalError(f"the device did not write a piece in {_WRITE_SECONDS:g} s")
        except Exception as error:
            self._spoiled(writing.transfer, error)
        else:
            now = time.monotonic()
            seconds = now - max(writing.began, self._written_at)
            self._written_at = now
            # Counted first: who hears that all is there asks by what it came.
            self._totals.received(header.num_bytes, max(seconds, header.copy_micros / 1e6))
            self._transfers.leave(writing.transfer, header.num_bytes, writing.part)
        self._moved_at = time.monotonic()
        self._give_back(writing.slot)

    def _give_back(self, slot: int) -> None:
        self._busy.discard(slot)
        self._sock.sendall(encode_credit(slot))

    def _settle_writes(self) -> None:
        """Nothing is written any more when it returns; what was is not told of."""
        for writing in self._writing:
            try:
                writing.ticket.wait(_WRITE_SECONDS)
            except Exception as error:
                _log.debug("a piece was not written: %s", error)
            self._transfers.leave(writing.transfer, 0, None)
        self._writing.clear()

    def _store(
        self,
        header: PieceHeader,
        checksum: Callable[[], int],
        write: Callable[[OpenTransfer, Part], None],
        seconds: Callable[[], float],
    ) -> None:
        """Looks at a piece that is here, and writes it where it is allowed to."""
        admitted = self._admit(header, checksum)
        if admitted is None:
            return
        transfer, part = admitted
        try:
            write(transfer, part)
        except Exception as error:
            self._spoiled(transfer, error)
            return
        self._totals.received(header.num_bytes, seconds())
        self._transfers.leave(transfer, header.num_bytes, part)

    def _admit(self, header: PieceHeader, checksum: Callable[[], int]) -> tuple[OpenTransfer, Part] | None:
        """Where a piece that is here goes, entered; None where it goes nowhere."""
        transfer = self._transfers.find(header)
        if transfer is None:
            self._totals.stray()
            return None
        if header.checksum is not None and header.checksum != checksum():
            self._involved.add(header.transfer_id)
            self._totals.corrupt()
            problem = f"checksum of layer {header.layer}, block {header.first_index} does not match"
            self._transfers.fail(header.transfer_id, f"{self._peer}: {problem}", corrupt=True)
            return None
        part = self._claim(transfer, header)
        if part is None:
            return None
        if not self._transfers.enter(transfer):
            self._totals.stray()
            return None
        return transfer, part

    def _spoiled(self, transfer: OpenTransfer, error: Exception) -> None:
        defect = not isinstance(error, ServiceError)
        level = logging.ERROR if defect else logging.WARNING
        _log.log(level, "a piece of %s could not be written: %s", self._peer, error, exc_info=error if defect else None)
        self._transfers.leave(transfer, 0, None)
        self._transfers.fail(transfer.inbound.transfer_id, f"a piece could not be written: {error}")

    def _claim(self, transfer: OpenTransfer, header: PieceHeader) -> Part | None:
        """None: the piece is wrong, and its transfer has failed."""
        self._involved.add(header.transfer_id)
        problem = self._transfers.problem(transfer, header)
        if not problem:
            try:
                return self._transfers.claim(transfer, header)
            except DataLoss as error:
                problem = error.message
        self._transfers.fail(header.transfer_id, f"{self._peer}: {problem}")
        return None

    def _fill(self, view: memoryview) -> None:
        while view:
            count = self._sock.recv_into(view, 0, socket.MSG_WAITALL)
            if count == 0:
                self._sender_closed = True
                raise ConnectionError("it ended within a piece")
            view = view[count:]

    def _drain(self, num_bytes: int) -> None:
        scratch = memoryview(bytearray(min(num_bytes, _SCRATCH_BYTES)))
        while num_bytes:
            part = scratch[: min(num_bytes, len(scratch))]
            self._fill(part)
            num_bytes -= len(part)

    # The end.

    def _end(self) -> None:
        """Slots go to nobody else while their sender may still write them, and only its closed end says that."""
        if self._bulk is not None:
            gone = self._sender_closed or self._wait_for_sender()
            self._bulk.close(sender_gone=gone and not self._cut)
        self._sock.close()

    def _wait_for_sender(self) -> bool:
        """Tells the sender that it is over, and waits until it has closed its end, if it takes for ever."""
        shut_down(self._sock, socket.SHUT_WR)
        scratch = bytearray(_SCRATCH_BYTES)
        while not self._cut:
            try:
                if not self._sock.recv_into(scratch):
                    return True
            except BlockingIOError:
                continue
            except ConnectionResetError:
                return True
            except OSError as error:  # its host is gone, and what it does cannot be known
                _log.warning("slots of %s are not used again: %s", self._peer, error)
                return False
        return False


def _is_over(ticket: Ticket) -> bool:
    try:
        return ticket.done()
    except Exception:  # told where the write is finished
        return True


def _ids(transfer: OpenTransfer, part: Part) -> tuple[BlockId, ...]:
    return transfer.inbound.block_ids[part.blocks.start : part.blocks.stop]
