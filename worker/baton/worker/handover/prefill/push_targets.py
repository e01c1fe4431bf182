"""From a receiver's descriptor to where the pieces of a prompt go."""

from __future__ import annotations

import functools

from baton.rpc.errors import InvalidRequest, Mismatch
from baton.v1 import kv_pb2
from baton.worker.executors.base import KvLayout
from baton.worker.handover.prefill.job import PrefillJob
from baton.worker.handover.prefill.push_progress import PushTarget
from baton.worker.transfer.base import Outbound, Transport


class PushTargets:
    """Of one worker: its epoch, its layout, and the most bytes that a piece shall have."""

    def __init__(self, transport: Transport, epoch: int, layout: KvLayout, piece_bytes: int) -> None:
        self._transport = transport
        self._epoch = epoch
        self.layout = layout
        self._piece_bytes = piece_bytes

    def open(self, job: PrefillJob, transfer: kv_pb2.TransferDescriptor) -> PushTarget:
        """Begins the push. Raises a ServiceError where nothing can be pushed there."""
        if job.progress is None:
            raise InvalidRequest("the accept came before the prefill had started", field="transfer")
        receiver = job.peer.layout
        assert receiver is not None, "a prefill is taken after the hello"
        self._check(transfer, job.progress.num_blocks_of(receiver.block_size), receiver.block_size)
        outbound = Outbound(
            push_id=job.push_id,
            addresses=tuple(transfer.transports),
            transfer_id=transfer.transfer_id,
            receiver_epoch=transfer.receiver_epoch,
            generation=transfer.generation,
            checksum=transfer.checksum,
            conversion=job.peer.conversion,
        )
        self._transport.connect(outbound)
        return PushTarget(
            block_size=receiver.block_size,
            first_block=transfer.first_block,
            max_block_layers=max(1, self._piece_bytes // self._bytes_to_handle(receiver)),
            push=functools.partial(self._transport.push, job.push_id),
            finish=functools.partial(self._transport.finish, job.push_id),
        )

    def _check(self, transfer: kv_pb2.TransferDescriptor, num_blocks: int, block_size: int) -> None:
        expected = num_blocks - transfer.first_block
        if expected < 1 or len(transfer.block_ids) != expected or not transfer.lease_ms:
            raise InvalidRequest(
                f"the transfer has {len(transfer.block_ids)} blocks from block {transfer.first_block} on and a lease "
                f"of {transfer.lease_ms} ms; the prompt has {num_blocks} blocks of {block_size} tokens",
                field="transfer.block_ids",
            )
        if transfer.sender_epoch != self._epoch:
            raise Mismatch(
                f"the transfer is for epoch {transfer.sender_epoch} of this worker, which is {self._epoch}",
                field="transfer.sender_epoch",
            )

    def _bytes_to_handle(self, receiver: KvLayout) -> int:
        """For one layer of one of the receiver's blocks, read here or written there."""
        ours = self.layout
        return max(receiver.bytes_per_block_layer, ours.bytes_per_block_layer * receiver.block_size // ours.block_size)
