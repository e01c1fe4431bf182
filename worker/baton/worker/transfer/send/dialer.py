"""Connects to a receiver over the best transport that works, and falls back to the next."""

from __future__ import annotations

import itertools
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from baton.rpc.errors import Mismatch, ServiceError, Unavailable
from baton.worker.executors.base import Executor
from baton.worker.transfer.bulk import BulkPath, Slots
from baton.worker.transfer.routes import Route
from baton.worker.transfer.send.pieces import SEND_SECONDS, InlinePieceSender, PieceSender, SlotPieceSender
from baton.worker.transfer.totals import Totals
from baton.worker.transfer.wire.connection_limit import retry_after_retiring
from baton.worker.transfer.wire.frames import Open, encode_open
from baton.worker.transfer.wire.greetings import receive_welcome
from baton.worker.transfer.wire.sockets import Connection, dial
from baton.worker.transfer.wire.tls import KvTls
from baton.worker.transport_kinds import wire_of

_log = logging.getLogger(__name__)

T = TypeVar("T")

_CONNECT_SECONDS = 2.0
_AVOID_SECONDS = 60.0  # after a kind failed with a peer


class Dialer:
    """Opens connections. Thread-safe. `paths`: by kind, None for tcp. `tls` secures every connection.

    `retire_idle` retires an idle connection of a kind. Returns whether there was one.
    """

    def __init__(
        self,
        executor: Executor,
        paths: Mapping[str, BulkPath | None],
        epoch: int,
        max_piece_bytes: int,
        totals: Totals,
        retire_idle: Callable[[str], bool],
        tls: KvTls | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tls = tls
        self._executor = executor
        self._paths = paths
        self._epoch = epoch
        self._max_piece_bytes = max_piece_bytes
        self._totals = totals
        self._retire_idle = retire_idle
        self._clock = clock
        self._avoided: dict[Route, float] = {}  # until when

    def open(
        self, routes: Sequence[Route], changed: threading.Condition, dialed: Callable[[socket.socket], None]
    ) -> PieceSender:
        """Returns a connection over the first route that works. Tries each once, and passes each socket to `dialed`.

        Raises OSError if the receiver cannot be reached, a ServiceError if the last kind was refused or cannot be used.
        """
        now = self._clock()
        usable = [route for route in routes[:-1] if self._avoided.get(route, 0.0) <= now] + [routes[-1]]
        for route, after in itertools.pairwise(usable):
            sock = self._dial(route, dialed)
            try:
                return self._open(route, sock, changed)
            except (ServiceError, ConnectionError, TimeoutError) as error:
                reason = error.message if isinstance(error, ServiceError) else str(error)
                self._avoid(route, now)
                self._totals.of(route.name).fell_back()
                _log.warning(
                    "sending KV to %s:%d over %s, since %s failed: %s",
                    route.host,
                    route.port,
                    after.name,
                    route.name,
                    reason,
                )
        return self._open(usable[-1], self._dial(usable[-1], dialed), changed)

    def _avoid(self, route: Route, now: float) -> None:
        known = {other: until for other, until in list(self._avoided.items()) if until > now}
        self._avoided = {**known, route: now + _AVOID_SECONDS}

    def _dial(self, route: Route, dialed: Callable[[socket.socket], None]) -> Connection:
        sock = dial(route.host, route.port, _CONNECT_SECONDS, SEND_SECONDS)
        try:
            dialed(sock)
            return self._tls.connect(sock, _CONNECT_SECONDS) if self._tls is not None else sock
        except BaseException:
            sock.close()
            raise

    def _open(self, route: Route, sock: Connection, changed: threading.Condition) -> PieceSender:
        path = self._paths[route.name]
        try:
            offer = b"" if path is None else _translated(path.offer, route.name)
            kind, plugin = wire_of(route.name)
            opened = Open(kind, self._executor.kv_spec.tp_rank, self._epoch, offer, route.key, plugin)
            sock.sendall(encode_open(opened))
            slots = receive_welcome(sock)
            totals = self._totals.of(route.name)
            if path is None:
                return InlinePieceSender(sock, self._executor, totals)
            self._check(slots)
            sender = retry_after_retiring(
                lambda: _translated(lambda: path.connect(slots), route.name), lambda: self._retire_idle(route.name)
            )
            peer = f"{route.host}:{route.port}"
            return SlotPieceSender(route.name, peer, sock, sender, slots, self._executor, totals, changed)
        except BaseException:
            sock.close()
            raise

    def _check(self, slots: Slots) -> None:
        if not slots.num_slots or slots.slot_bytes < self._max_piece_bytes:
            raise Mismatch(
                f"the receiver has {slots.num_slots} slots of {slots.slot_bytes} bytes; "
                f"a piece has up to {self._max_piece_bytes}"
            )


def _translated(call: Callable[[], T], name: str) -> T:
    """Calls a transport's library. Translates its errors into ServiceErrors."""
    try:
        return call()
    except ServiceError:
        raise
    except Exception as error:
        _log.exception("%s cannot be used", name)
        raise Unavailable(f"{name} cannot be used: {type(error).__name__}: {error}") from error
