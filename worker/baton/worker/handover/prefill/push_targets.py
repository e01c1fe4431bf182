"""Creates the target of a push from the receiver's descriptor."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from baton.rpc.errors import InvalidRequest, Mismatch
from baton.v1 import kv_pb2
from baton.worker.handover.prefill.job import PrefillJob
from baton.worker.handover.prefill.push_progress import PushProgress, PushTarget, TargetGroup
from baton.worker.kv_spec import KvKind, KvSpec
from baton.worker.transfer.base import Outbound, Transport


class PushTargets:
    """Opens pushes for this worker's epoch and KV spec, with a limit on the size of a piece."""

    def __init__(self, transport: Transport, epoch: int, kv_spec: KvSpec, piece_bytes: int) -> None:
        self._transport = transport
        self._epoch = epoch
        self.kv_spec = kv_spec
        self._piece_bytes = piece_bytes

    def open(self, job: PrefillJob, transfer: kv_pb2.TransferDescriptor) -> PushTarget:
        """Begins the push. Raises a ServiceError if nothing can be pushed there."""
        if job.progress is None:
            raise InvalidRequest("the accept was received before the prefill had started", field="transfer")
        receiver = job.peer.kv_spec
        assert receiver is not None, "a submit is accepted only after the hello"
        tables = tables_of(transfer)
        self._check(transfer, tables, job.progress, receiver)
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
            groups=[
                TargetGroup(table.first_block, max(1, self._piece_bytes // self._bytes_to_handle(receiver, index)))
                for index, table in enumerate(tables)
            ],
            push=functools.partial(self._transport.push, job.push_id),
            finish=functools.partial(self._transport.finish, job.push_id),
        )

    def _check(
        self,
        transfer: kv_pb2.TransferDescriptor,
        tables: Sequence[kv_pb2.GroupBlocks],
        progress: PushProgress,
        receiver: KvSpec,
    ) -> None:
        num_blocks = progress.num_blocks_of(receiver.block_size)
        if len(tables) != len(receiver.groups):
            raise InvalidRequest(
                f"the transfer has blocks of {len(tables)} groups; the layout has {len(receiver.groups)}",
                field="transfer.more_groups",
            )
        for index, (table, group) in enumerate(zip(tables, receiver.groups, strict=True)):
            least = group.first_moved(progress.num_tokens, receiver.block_size)
            if table.first_block < least:
                raise InvalidRequest(
                    f"the transfer begins at block {table.first_block} of group {index}; this worker has the prompt's "
                    f"blocks of that group from block {least} on",
                    field="transfer.more_groups",
                )
            expected = num_blocks - table.first_block
            if expected < 1 or len(table.block_ids) != expected or not transfer.lease_ms:
                raise InvalidRequest(
                    f"the transfer has {len(table.block_ids)} blocks from block {table.first_block} on and a lease "
                    f"of {transfer.lease_ms} ms; the prompt has {num_blocks} blocks of {receiver.block_size} tokens",
                    field="transfer.block_ids",
                )
        if transfer.sender_epoch != self._epoch:
            raise Mismatch(
                f"the transfer is for epoch {transfer.sender_epoch} of this worker, expected {self._epoch}",
                field="transfer.sender_epoch",
            )

    def _bytes_to_handle(self, receiver: KvSpec, index: int) -> int:
        """Returns the larger size of one layer of a receiver's block: as read here, or as written there."""
        ours, theirs = self.kv_spec, receiver
        num_bytes = ours.bytes_per_block_layer(ours.groups[index])
        if ours.groups[index].kind is KvKind.STATE:
            return num_bytes
        return max(theirs.bytes_per_block_layer(theirs.groups[index]), num_bytes * theirs.block_size // ours.block_size)


def tables_of(transfer: kv_pb2.TransferDescriptor) -> list[kv_pb2.GroupBlocks]:
    """Returns the receiver's blocks of each group."""
    first = kv_pb2.GroupBlocks(first_block=transfer.first_block, block_ids=transfer.block_ids)
    return [first, *transfer.more_groups]
