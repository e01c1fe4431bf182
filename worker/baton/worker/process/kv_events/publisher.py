"""Publishes batches of KV events over ZeroMQ, and replays the last ones. A thread of its own owns the sockets.

PUB: topic, sequence number, payload. ROUTER: a request has a sequence number; the answer is every kept batch from there
on, and then -1 with an empty payload. Sequence numbers are 8 bytes, big-endian, and begin at 0.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from typing import Any

from baton.rpc.errors import InvalidRequest
from baton.worker.kv_events_settings import KvEventsSettings

_log = logging.getLogger(__name__)

_END = (-1).to_bytes(8, "big", signed=True)
_POLL_SECONDS = 0.05
_JOIN_SECONDS = 2.0
_FIELD = "kv_events_config"


class ZmqPublisher:
    """One publisher. `publish` never waits."""

    def __init__(self, settings: KvEventsSettings) -> None:
        try:
            import msgspec
            import zmq
        except ImportError as error:
            raise InvalidRequest(
                f'{_FIELD} needs the package {error.name}: pip install "baton-inference[kv-events]"', field=_FIELD
            ) from error
        self._zmq: Any = zmq
        self._encode = msgspec.msgpack.Encoder().encode
        self._topic = settings.topic.encode()
        self._queue: queue.Queue[Any] = queue.Queue(settings.max_queue_size)
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=settings.buffer_steps)
        self._sequence = 0
        self.num_dropped = 0
        self._context = zmq.Context()
        self._pub = self._open(zmq.PUB, settings.endpoint, settings.hwm, "endpoint")
        self._replay: Any = None
        if settings.replay_endpoint is not None:
            self._replay = self._open(zmq.ROUTER, settings.replay_endpoint, settings.hwm, "replay_endpoint")
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def publish(self, batch: Any) -> None:
        """Queues a batch, or drops it if too many wait: subscribers see the gap in the sequence."""
        sequence, self._sequence = self._sequence, self._sequence + 1
        try:
            self._queue.put_nowait((sequence, batch))
        except queue.Full:
            self.num_dropped += 1
            _log.warning("a batch of KV events was dropped: %d wait", self._queue.qsize())

    def close(self) -> None:
        """Sends what waits, and closes the sockets. Idempotent."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join(_JOIN_SECONDS)

    def _open(self, kind: int, endpoint: str, hwm: int, key: str) -> Any:
        socket = self._context.socket(kind)
        socket.set_hwm(hwm)
        socket.linger = 1000
        # Subscribers know a worker's own port, or collect from many workers on theirs.
        binds = kind == self._zmq.ROUTER or not endpoint.startswith("tcp://") or "*" in endpoint or "::" in endpoint
        try:
            (socket.bind if binds else socket.connect)(endpoint)
        except self._zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise InvalidRequest(f"{_FIELD}: {key} {endpoint!r} cannot be used: {error}", field=_FIELD) from error
        return socket

    def _run(self) -> None:
        while True:
            if self._replay is not None:
                self._serve_replays()
            try:
                waiting = self._queue.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                continue
            if waiting is None:
                break
            sequence, batch = waiting
            payload = self._encode(batch)
            self._kept.append((sequence, payload))
            self._pub.send_multipart((self._topic, sequence.to_bytes(8, "big"), payload))
        self._pub.close()
        if self._replay is not None:
            self._replay.close()
        self._context.term()

    def _serve_replays(self) -> None:
        while self._replay.poll(0):
            frames = self._replay.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                _log.warning("a replay request has %d frames; it must be an empty one and 8 bytes", len(frames) - 1)
                continue
            client, first = frames[0], int.from_bytes(frames[2], "big")
            for sequence, payload in self._kept:
                if sequence >= first:
                    self._replay.send_multipart((client, b"", sequence.to_bytes(8, "big"), payload))
            self._replay.send_multipart((client, b"", _END, b""))
