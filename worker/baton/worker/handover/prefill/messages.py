"""Messages about prefills to the decode workers that requested them."""

from __future__ import annotations

from collections.abc import Callable

from baton.v1 import kv_pb2, worker_pb2
from baton.worker.handover.prefill.job import DecodePeer, PrefillJob

Message = worker_pb2.PrefillStreamResponse


class PushMessages:
    """Sends each message on its peer's stream, unless that is closed."""

    def __init__(self, send: Callable[[int, Message], None]) -> None:
        self._send = send

    def send(self, peer: DecodePeer, message: Message) -> None:
        """Sends any message."""
        if peer.open:
            self._send(peer.channel, message)

    def sent(self, job: PrefillJob) -> None:
        """Reports that all pieces are sent."""
        sent = kv_pb2.TransferSent(transfer_id=job.transfer_id, num_pieces=job.num_pieces, num_bytes=job.num_bytes)
        self.send(job.peer, Message(sent=sent))

    def abort(self, job: PrefillJob) -> None:
        """Asks the peer to stop."""
        assert job.lease is not None, "only a lease is aborted"
        abort = kv_pb2.TransferAbort(transfer_id=job.transfer_id, reason=job.lease.reason)
        self.send(job.peer, Message(abort=abort))

    def aborted(self, peer: DecodePeer, transfer_id: int) -> None:
        """Answers an abort: nothing is read or sent any more."""
        self.send(peer, Message(aborted=kv_pb2.TransferAborted(transfer_id=transfer_id)))
