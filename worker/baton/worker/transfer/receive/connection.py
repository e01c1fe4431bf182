"""Step 2 of receiving: one sender's connection. Authenticates it, runs its piece receiver, and closes it safely."""

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
    """One sender's connection. `run` runs on the connection's own thread; other methods are for any thread."""

    def __init__(
        self,
        sock: Connection,
        peer: str,
        key: bytes,
        executor: Executor,
        transfers: OpenTransfers,
        paths: Mapping[str, BulkPath | None],
        totals: Totals,
        retire_idle: Callable[[str], bool],
        tls: KvTls | None = None,
    ) -> None:
        self._sock = sock
        self._tls = tls
        self._peer = peer
        self._key = key
        self._executor = executor
        self._transfers = transfers
        self._paths = paths
        self._retire_idle = retire_idle  # asks another connection of a kind to close
        self._all_totals = totals
        self._totals = totals.of("tcp")  # until the sender has named its kind
        self._kind = ""
        self._incoming: PieceReceiver | None = None  # None until the sender was welcomed
        self._retired = False
        self._cut = False

    def idle_since(self, kind: str) -> float | None:
        """Returns when a piece was last received. None: more pieces are expected, it is retired, or of another kind."""
        incoming = self._incoming
        if incoming is None or kind != self._kind or self._retired:
            return None
        return incoming.idle_since()

    def retire(self) -> None:
        """Asks the sender to close its end."""
        self._retired = True
        _log.info("the KV connection of %s was idle longest; closing it to free slots for another", self._peer)
        shut_down(self._sock, socket.SHUT_WR)

    def cut(self) -> None:
        """Wakes the connection's thread and ends it."""
        self._cut = True
        if self._incoming is not None:
            self._incoming.cut()
        shut_down(self._sock)

    def run(self) -> None:
        """Runs until the sender closes its end, or `cut` is called."""
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
        except Exception as error:  # of the executor: a thread must not end without a report
            reason = f"pieces could not be written: {error}"
            _log.exception("KV connection of %s failed", self._peer)
        finally:
            if self._incoming is not None:
                self._incoming.fail(reason)
                self._end(self._incoming)
            self._sock.close()

    # The handshake.

    def _secure(self) -> None:
        """Starts TLS if this worker uses it. Raises DataLoss if the handshake with the peer fails."""
        if self._tls is None:
            return
        assert isinstance(self._sock, socket.socket), "the socket is not secured twice"
        try:
            self._sock = self._tls.accept(self._sock, _GREETING_SECONDS)
        except OSError as error:
            raise DataLoss(f"the TLS handshake failed: {error}") from error

    def _greet(self) -> PieceReceiver | None:
        """Welcomes the sender. Returns None if it is refused. Raises DataLoss if it does not speak this protocol."""
        opened = receive_open(self._sock)
        name = name_of(opened.kind, opened.plugin)
        try:
            self._check_key(opened)
            if name not in self._paths:
                raise Unsupported(f"KV over {name} is not received here, only over {', '.join(self._paths)}")
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
        """Authenticates the sender, before its offer is parsed. Raises PermissionDenied."""
        if self._tls is not None and (problem := self._tls.refusal(self._sock)):
            self._totals.stranger()
            raise PermissionDenied(f"this peer may not send KV: {problem}")
        if not hmac.compare_digest(opened.key, self._key):
            self._totals.stranger()
            raise PermissionDenied("the connection does not present this receiver's key, which control streams carry")

    def _accept(self, name: str, opened: Open) -> BulkReceiver | None:
        path = self._paths[name]
        if path is None:
            return None
        try:
            return retry_after_retiring(lambda: path.accept(opened.offer), lambda: self._retire_idle(name))
        except ServiceError:
            raise
        except Exception as error:  # of a library: the sender receives it as an error
            _log.exception("slots for %s could not be made", self._peer)
            raise InternalError(f"slots for {name} could not be made: {error}") from error

    def _serve(self, bulk: BulkReceiver | None) -> PieceReceiver:
        admission = PieceAdmission(self._peer, self._transfers, self._totals)
        if bulk is None:
            return InlinePieceReceiver(self._sock, self._executor, self._transfers, admission, self._totals)
        return SlotPieceReceiver(self._sock, self._peer, bulk, admission)

    # The end.

    def _end(self, incoming: PieceReceiver) -> None:
        """Releases the slots. They may be reused once the sender has closed its end, so that it cannot write them."""
        gone = not incoming.sender_writes or self._wait_for_sender()
        incoming.close(sender_gone=gone and not self._cut)

    def _wait_for_sender(self) -> bool:
        """Ends our direction, and waits without a limit for the sender to close its end. Whether it did."""
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
            except OSError as error:  # its host is unreachable, and may still write
                _log.warning("slots of %s are not reused: %s", self._peer, error)
                return False
        return False
