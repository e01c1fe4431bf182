"""Messages about remote prefills to the peers that compute them."""

from __future__ import annotations

from baton.v1 import kv_pb2, worker_pb2
from baton.worker.handover.decode.prefill_peers import Message, PrefillPeers
from baton.worker.handover.decode.remote_prefill import PrefillPeer, RemotePrefill
from baton.worker.handover.messages import prefill_submit
from baton.worker.handover.settings import HandoverSettings
from baton.worker.transfer.base import Transport


class PrefillMessages:
    """Sends each message on the stream of a prefill's peer. `hello` is this worker's."""

    def __init__(
        self,
        peers: PrefillPeers,
        transport: Transport,
        hello: kv_pb2.PeerHello,
        settings: HandoverSettings,
    ) -> None:
        self._peers = peers
        self._transport = transport
        self._hello = hello
        self._settings = settings

    def submit(self, prefill: RemotePrefill, now: float) -> None:
        """Requests the prefill."""
        submit = prefill_submit(prefill.request, prefill.prefill_id, prefill.num_cached_tokens, prefill.num_tokens, now)
        self._peers.send(prefill.peer, Message(submit=submit))

    def accept(self, prefill: RemotePrefill, generation: int) -> None:
        """Sends the leased blocks, and where the transport receives them."""
        first, *more = prefill.spans
        pages = map(self._peers.kv_spec.pages_each, self._peers.kv_spec.groups[1:])
        descriptor = kv_pb2.TransferDescriptor(
            transfer_id=prefill.transfer_id,
            sender_epoch=prefill.peer.epoch,
            receiver_epoch=self._hello.epoch,
            first_block=first.first,
            block_ids=first.block_ids,
            generation=generation,
            lease_ms=round(self._settings.lease_seconds * 1000),
            transports=self._transport.addresses,
            checksum=self._settings.verify,
            more_groups=[
                kv_pb2.GroupBlocks(first_block=span.first, block_ids=span.block_ids[::each])
                for span, each in zip(more, pages, strict=True)
            ],
        )
        accept = worker_pb2.PrefillAccept(prefill_id=prefill.prefill_id, transfer=descriptor)
        self._peers.send(prefill.peer, Message(accept=accept))

    def cancel(self, prefill: RemotePrefill) -> None:
        """Cancels a prefill without a lease."""
        self._peers.send(prefill.peer, Message(cancel=worker_pb2.PrefillCancel(prefill_id=prefill.prefill_id)))

    def complete(self, prefill: RemotePrefill) -> None:
        """Reports that every block has landed."""
        complete = kv_pb2.TransferComplete(transfer_id=prefill.transfer_id)
        self._peers.send(prefill.peer, Message(complete=complete))

    def abort(self, prefill: RemotePrefill) -> None:
        """Asks the peer to stop."""
        assert prefill.lease is not None, "only a lease is aborted"
        abort = kv_pb2.TransferAbort(transfer_id=prefill.transfer_id, reason=prefill.lease.reason)
        self._peers.send(prefill.peer, Message(abort=abort))

    def aborted(self, peer: PrefillPeer, transfer_id: int) -> None:
        """Answers an abort: nothing is written any more."""
        self._peers.send(peer, Message(aborted=kv_pb2.TransferAborted(transfer_id=transfer_id)))
