"""One worker's publish stream: applies its messages to the index and answers them. Does no I/O."""

from __future__ import annotations

from baton.kvstore.index.index import Applied, Index
from baton.rpc.errors import InvalidRequest
from baton.v1 import index_pb2, kv_pb2


class PublishSession:
    """One stream, from its hello to its end."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._awaits_snapshot = False
        self._hello_sequence = 0  # the worker's sequence at its hello, or the barrier of a later snapshot
        self.worker_id = ""  # set by the hello
        self.term = 0

    @property
    def is_caught_up(self) -> bool:
        """Whether the index has all events up to the worker's hello, and none since is missing."""
        known = self._index.get(self.worker_id)
        return known is not None and not self._awaits_snapshot and known.sequence >= self._hello_sequence

    def handle(self, request: index_pb2.PublishRequest) -> index_pb2.PublishResponse | None:
        """Applies a message and returns the answer, if it needs one. Raises InvalidRequest if the stream must end."""
        kind = request.WhichOneof("message")
        if kind is None:
            raise InvalidRequest("a publish message is empty; one of its fields must be set", field="message")
        if kind == "hello":
            return self._hello(request.hello)
        if not self.worker_id:
            raise InvalidRequest(f"the first message is a {kind}; it must be the hello", field="hello")
        if kind == "batch":
            self._check_worker(request.batch.worker_id, "batch.worker_id")
            return self._batch(request.batch)
        if kind == "snapshot":
            self._check_worker(request.snapshot.worker_id, "snapshot.worker_id")
            return self._snapshot(request.snapshot)
        return self._heartbeat(request.heartbeat)

    def _hello(self, hello: index_pb2.PublishHello) -> index_pb2.PublishResponse:
        if self.worker_id:
            raise InvalidRequest("a second hello on one stream", field="hello")
        if not hello.worker_id:
            raise InvalidRequest("hello.worker_id is empty", field="hello.worker_id")
        self.worker_id, self.term, self._hello_sequence = hello.worker_id, hello.term, hello.sequence
        return self._answer(self._index.confirm(hello.worker_id, hello.epoch, hello.sequence, hello.first_kept))

    def _heartbeat(self, heartbeat: index_pb2.PublishHeartbeat) -> index_pb2.PublishResponse | None:
        known = self._index.get(self.worker_id)
        if known is None and not self._awaits_snapshot:
            # The worker was forgotten while its stream hung.
            return self._answer(Applied.OUT_OF_STEP)
        if known is not None and not self._awaits_snapshot and heartbeat.epoch:
            sent = (heartbeat.epoch, heartbeat.sequence)
            if sent[0] != known.epoch or sent[1] > known.sequence:
                return self._answer(Applied.OUT_OF_STEP)
        if not heartbeat.wants_answer:
            return None
        return index_pb2.PublishResponse(acknowledged_sequence=known.sequence if known is not None else 0)

    def _batch(self, batch: kv_pb2.KvEventBatch) -> index_pb2.PublishResponse | None:
        applied = self._index.apply(batch)
        if applied is Applied.YES:
            return None  # acknowledged with the next heartbeat
        if self._awaits_snapshot:
            # The worker sent this before it read the request for a snapshot, which will include it.
            return None
        return self._answer(applied)

    def _snapshot(self, part: kv_pb2.KvSnapshot) -> index_pb2.PublishResponse | None:
        applied = self._index.receive(part)
        if applied is Applied.PARTLY:
            return None
        if applied is Applied.YES:
            self._hello_sequence = part.barrier
        return self._answer(applied)

    def _answer(self, applied: Applied) -> index_pb2.PublishResponse:
        self._awaits_snapshot = applied is Applied.OUT_OF_STEP
        known = self._index.get(self.worker_id)
        return index_pb2.PublishResponse(
            acknowledged_sequence=known.sequence if known is not None else 0, snapshot_wanted=self._awaits_snapshot
        )

    def _check_worker(self, worker_id: str, field: str) -> None:
        if worker_id != self.worker_id:
            raise InvalidRequest(f"{field}={worker_id!r} on the stream of worker {self.worker_id!r}", field=field)
