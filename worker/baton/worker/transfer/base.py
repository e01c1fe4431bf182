"""The interface of every transport, which moves KV bytes between workers. Knows nothing of leases.

All methods return at once; `poll` returns their results. The engine thread calls them all; any thread may call `push`
and `finish`. Bytes move on threads of the transport.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from baton.v1 import kv_pb2
from baton.worker.core import BlockId

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Inbound:
    """The blocks that a peer may write, if it presents the generation."""

    transfer_id: int
    receiver_epoch: int
    generation: int
    block_ids: tuple[BlockId, ...]  # of the first group
    checksum: bool  # every piece must have a checksum
    more_block_ids: tuple[tuple[BlockId, ...], ...] = ()  # of the other groups; of states, their pages

    @property
    def tables(self) -> tuple[tuple[BlockId, ...], ...]:
        """The blocks of every group."""
        return self.block_ids, *self.more_block_ids


@dataclass(frozen=True, slots=True)
class Piece:
    """Neighbouring layers of neighbouring blocks of one of the receiver's groups, and the sender's blocks of them.

    Its bytes are [num_blocks, num_layers, bytes of a block's layer], as one launch of the gather kernel writes them. A
    layer that is pushed as it finishes is one piece; layers that are ready together share pieces.
    """

    layer: int  # the first KV layer
    first_index: int  # index in the receiver's block list of the group
    num_blocks: int  # in blocks of the receiver's size
    block_ids: Sequence[BlockId]  # the sender's blocks; of states, their pages
    skip_tokens: int = 0  # tokens of the sender's first block before the piece begins; 0 without conversion
    num_layers: int = 1


class KvConversion(Protocol):
    """Converts KV from the sender's layout to the layout of one receiver rank. Pure."""

    def heads(self, layer: int) -> tuple[int, int] | None:
        """Returns the first and the number of the receiver rank's heads that a KV layer's pieces have; None: all."""

    def layer_bytes(self, layer: int) -> int:
        """Returns the bytes of one of the receiver's blocks in a KV layer, of these heads."""

    def on_host(self, data: memoryview, piece: Piece) -> memoryview:
        """Converts a piece, given as len(piece.block_ids) whole blocks of the sender."""

    def on_device(self, values: Tensor, piece: Piece) -> Tensor:
        """Converts [len(piece.block_ids), num_layers, 2, KV heads of the rank, block_size, head_dim]. Contiguous."""


@dataclass(frozen=True, slots=True)
class Outbound:
    """The target of a push. `push_id` is unique at the sender; transfer ids of two receivers may be equal."""

    push_id: int
    addresses: Sequence[kv_pb2.TransportAddress]  # all addresses of the receiver; the transport chooses one
    transfer_id: int
    receiver_epoch: int
    generation: int
    checksum: bool
    conversion: KvConversion | None = None  # None: the layouts are equal


@dataclass(frozen=True, slots=True)
class Landed:
    """Every block of every layer was received once and verified. No more bytes are written."""

    transfer_id: int
    num_pieces: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class InboundFailed:
    """A piece was invalid, or the connection ended. Only started writes continue; fence next."""

    transfer_id: int
    reason: str
    corrupt: bool  # a checksum did not match


@dataclass(frozen=True, slots=True)
class InboundFenced:
    """No more bytes of the transfer will be written."""

    transfer_id: int


@dataclass(frozen=True, slots=True)
class Pushed:
    """Every piece was sent, and the sender's blocks are no longer read."""

    push_id: int
    num_pieces: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class PushFailed:
    """The peer cannot be reached, or does not take the bytes in time. Fence next."""

    push_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class PushFenced:
    """No more bytes of the push will be sent, and the sender's blocks are no longer read."""

    push_id: int


TransportEvent = Landed | InboundFailed | InboundFenced | Pushed | PushFailed | PushFenced


@dataclass(slots=True)
class TransportTotals:
    """Totals since the start."""

    num_received_pieces: int = 0
    num_received_bytes: int = 0
    receive_seconds: float = 0.0  # while bytes of pieces were received
    num_stray_pieces: int = 0  # of no open transfer; drained and discarded
    num_corrupt_pieces: int = 0
    num_bad_connections: int = 0  # that did not speak this protocol
    num_sent_pieces: int = 0
    num_sent_bytes: int = 0
    send_seconds: float = 0.0  # while bytes of pieces were sent
    num_refused: int = 0  # connections of senders that were refused
    num_strangers: int = 0  # refused connections that did not present this receiver's key
    num_fallbacks: int = 0  # connections that another kind had to serve


class Transport(Protocol):
    """Moves KV pieces from a sender's blocks to a receiver's."""

    fences_locally: bool  # the receiver can stop a peer's writes without an answer of the peer

    @property
    def addresses(self) -> list[kv_pb2.TransportAddress]:
        """The addresses where this worker receives KV: one for each kind, best first."""

    def poll(self) -> list[TransportEvent]:
        """Returns the events since the last call, in order."""

    def totals(self) -> TransportTotals:
        """Returns current totals of all kinds together."""

    def totals_by_kind(self) -> dict[str, TransportTotals]:
        """Returns current totals of each kind that this worker has: tcp, ipc, rdma, nccl."""

    def close(self) -> None:
        """Ends every transfer and thread. Idempotent."""

    # For the receiver.

    def open(self, inbound: Inbound) -> None:
        """Accepts pieces of this transfer from now on, until it has landed, failed or been fenced."""

    def num_landed_bytes(self, transfer_id: int) -> int:
        """Returns how many bytes of an open transfer have arrived."""

    def fence_inbound(self, transfer_id: int) -> None:
        """Stops writes. InboundFenced follows, for unknown transfers too."""

    def cut_inbound(self, transfer_id: int) -> None:
        """Stops writes at once, even if other transfers of this peer fail. InboundFenced follows soon."""

    # For the sender.

    def connect(self, outbound: Outbound) -> None:
        """Begins a push, and dials if needed.

        Raises InvalidRequest for an invalid address, Mismatch if the two ends have no transport in common.
        """

    def push(self, push_id: int, piece: Piece) -> None:
        """Queues or starts one piece. Ignores unknown pushes."""

    def finish(self, push_id: int) -> None:
        """Marks the last piece as pushed. Pushed follows when all are sent."""

    def fence_outbound(self, push_id: int) -> None:
        """Drops queued pieces; one that is being sent is finished. PushFenced follows, for unknown pushes too."""

    def cut_outbound(self, push_id: int) -> None:
        """Cuts the connection, even if other pushes on it fail. PushFenced follows soon."""

    def forget(self, push_id: int) -> None:
        """Drops a push that is fenced or complete. Idempotent."""
