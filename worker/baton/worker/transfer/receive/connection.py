"""One sender's connection at the receiver: greets it, takes what comes, and sees to its end."""

from __future__ import annotations

import hmac
import logging
import socket
from collections.abc import Callable, Mapping

from baton.rpc.errors import DataLoss, InternalError, PermissionDenied, ServiceError, Unsupported
from baton.worker.executors.base import Executor
from baton.worker.transfer.bulk import BulkPath, BulkReceiver, Slots
from baton.worker.transfer.receive.inline_pieces import InlinePieceReceiver
from baton.worker.transfer.receive.open_transfers import OpenTransfers
from baton.worker.transfer.receive.pieces import BODY_SECONDS, PieceAdmission, PieceReceiver
from baton.worker.transfer.receive.slot_pieces import SlotPieceReceiver
from baton.worker.transfer.totals import Totals
from baton.worker.transfer.wire.connection_limit import retry_after_retiring
from baton.worker.transfer.wire.frames import Open, encode_refused, encode_welcome
from baton.worker.transfer.wire.greetings import receive_open
from baton.worker.transfer.wire.sockets import Connection, limit_receives, shut_down, tune
from baton.worker.transfer.wire.tls import KvTls
from baton.worker.transport_kinds import name_of

_log = logging.getLogger(__name__)

_GREETING_SECONDS = 5.0
_NO_SLOTS = Slots(0, 0, b"")
_SCRATCH_BYTES = 1 << 20


class InboundConnection:
    """A sender's connection. `run` belongs to its thread, the rest to any."""

    def __init__(
        self,
        sock: Connection,
        peer: str,
        key: bytes,
        executor: Executor,
        transfers: OpenTransfers,
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
        self._incoming: PieceReceiver | None = None  # once the sender was greeted
        self._retired = False
        self._cut = False

    def idle_since(self, kind: str) -> float | None:
        """When a piece last came. None: more are to come, it was asked to go, or it is of another kind."""
        incoming = self._incoming
        if incoming is None or kind != self._kind or self._retired:
            return None
        return incoming.idle_since()

    def retire(self) -> None:
        """Asks the sender to close its end."""
        self._retired = True
        _log.info("the KV connection of %s was not used for longest, and makes room for another", self._peer)
        shut_down(self._sock, socket.SHUT_WR)

    def cut(self) -> None:
        """Wakes its thread, for the last time."""
        self._cut = True
        if self._incoming is not None:
            self._incoming.cut()
        shut_down(self._sock)

    def run(self) -> None:
        """Until the sender's end is closed, or it is cut."""
        reason = "the connection ended"
        try:
            tune(self._sock)
            limit_receives(self._sock, _GREETING_SECONDS)
            self._secure()
            if incoming := self._greet():
                limit_receives(self._sock, BODY_SECONDS)
                incoming.receive()
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
            if self._incoming is not None:
                self._incoming.fail(reason)
                self._end(self._incoming)
            self._sock.close()

    # The greeting.

    def _secure(self) -> None:
        """Goes on over TLS where this worker does. Raises DataLoss for a peer that does not, or shows nothing good."""
        if self._tls is None:
            return
        assert isinstance(self._sock, socket.socket), "it is not secured yet"
        try:
            self._sock = self._tls.accept(self._sock, _GREETING_SECONDS)
        except OSError as error:
            raise DataLoss(f"the TLS handshake failed: {error}") from error

    def _greet(self) -> PieceReceiver | None:
        """None: the sender is not served. Raises DataLoss for one that speaks something else."""
        opened = receive_open(self._sock)
        name = name_of(opened.kind)
        try:
            self._check_key(opened)
            if name not in self._paths:
                raise Unsupported(f"this worker takes no KV over {name}; it takes {', '.join(self._paths)}")
            self._totals = self._all_totals.of(name)
            bulk = self._accept(name, opened)
        except ServiceError as error:
            self._totals.refused()
            _log.warning("KV connection of %s over %s refused: %s", self._peer, name, error.message)
            self._sock.sendall(encode_refused(error))
            return None
        self._incoming = self._serve(bulk)
        self._kind = name
        self._sock.sendall(encode_welcome(_NO_SLOTS if bulk is None else bulk.slots))
        return self._incoming

    def _check_key(self, opened: Open) -> None:
        """Before anything that the sender offers is looked at. Raises PermissionDenied."""
        if self._tls is not None and (problem := self._tls.refusal(self._sock)):
            self._totals.stranger()
            raise PermissionDenied(f"no KV is taken of this peer: {problem}")
        if not hmac.compare_digest(opened.key, self._key):
            self._totals.stranger()
            raise PermissionDenied("the connection does not show the key that this receiver tells over control streams")

    def _accept(self, name: str, opened: Open) -> BulkReceiver | None:
        path = self._paths[name]
        if path is None:
            return None
        try:
            return retry_after_retiring(lambda: path.accept(opened.offer), lambda: self._make_room(name))
        except ServiceError:
            raise
        except Exception as error:  # of a library: the sender must hear of it
            _log.exception("slots for %s could not be made", self._peer)
            raise InternalError(f"slots for {name} could not be made: {error}") from error

    def _serve(self, bulk: BulkReceiver | None) -> PieceReceiver:
        admission = PieceAdmission(self._peer, self._transfers, self._totals)
        if bulk is None:
            return InlinePieceReceiver(self._sock, self._executor, self._transfers, admission, self._totals)
        return SlotPieceReceiver(self._sock, self._peer, bulk, admission)

    # The end.

    def _end(self, incoming: PieceReceiver) -> None:
        """Slots go to nobody else while their sender may still write them, and only its closed end says that."""
        gone = not incoming.sender_writes or self._wait_for_sender()
        incoming.close(sender_gone=gone and not self._cut)

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
