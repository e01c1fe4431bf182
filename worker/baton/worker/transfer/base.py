"""What moves KV bytes between workers: the verbs that every transport has. Decides nothing about leases.

All verbs return at once; what comes of them is told by `poll`. Verbs and poll belong to the engine thread, `push` and
`finish` to any. Bytes move on threads of the transport's own.
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
    """What the receiver lets a peer write: these blocks, for whoever shows the generation."""

    transfer_id: int
    receiver_epoch: int
    generation: int
    block_ids: tuple[BlockId, ...]  # of the first group
    checksum: bool  # every piece must carry one
    more_block_ids: tuple[tuple[BlockId, ...], ...] = ()  # of the other groups

    @property
    def tables(self) -> tuple[tuple[BlockId, ...], ...]:
        """The blocks of every group."""
        return self.block_ids, *self.more_block_ids


@dataclass(frozen=True, slots=True)
class Piece:
    """Some neighbouring KV layers of some neighbouring blocks of one of the receiver's groups, and where the sender
    has them.

    Its bytes are [num_blocks, num_layers, bytes of a block's layer]: what the gather kernel makes in one launch. A
    layer that is pushed as it finishes is a piece of its own; what is ready at once goes in pieces of several layers.
    """

    layer: int  # the first, a KV layer
    first_index: int  # into the receiver's block list of the group
    num_blocks: int  # of the receiver's size
    block_ids: Sequence[BlockId]  # of the sender
    skip_tokens: int = 0  # of the sender's first block, before the piece begins; under conversion only
    num_layers: int = 1


class KvConversion(Protocol):
    """From the sender's layout to one receiver rank's. Pure."""

    def heads(self, layer: int) -> tuple[int, int] | None:
        """Returns the first and the number of the receiver rank's heads that a KV layer's pieces have; None: all."""

    def layer_bytes(self, layer: int) -> int:
        """Returns the bytes of one of the receiver's blocks in a KV layer, of these heads."""

    def on_host(self, data: memoryview, piece: Piece) -> memoryview:
        """The piece as the receiver takes it, from len(piece.block_ids) whole blocks of the sender."""

    def on_device(self, values: Tensor, piece: Piece) -> Tensor:
        """The same of [len(piece.block_ids), num_layers, 2, kv heads of the rank, block_size, head_dim]; contiguous."""


@dataclass(frozen=True, slots=True)
class Outbound:
    """Where the sender writes. `push_id` is the sender's own: transfer ids of two receivers may be equal."""

    push_id: int
    addresses: Sequence[kv_pb2.TransportAddress]  # all that the receiver takes; the transport chooses
    transfer_id: int
    receiver_epoch: int
    generation: int
    checksum: bool
    conversion: KvConversion | None = None  # None: the layouts are equal


@dataclass(frozen=True, slots=True)
class Landed:
    """Every block of every layer was received once and verified. No byte is written any more."""

    transfer_id: int
    num_pieces: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class InboundFailed:
    """What arrived was wrong, or the connection ended. Nothing more is written than what was begun; fence next."""

    transfer_id: int
    reason: str
    corrupt: bool  # a checksum did not match


@dataclass(frozen=True, slots=True)
class InboundFenced:
    """No byte of the transfer will be written any more."""

    transfer_id: int


@dataclass(frozen=True, slots=True)
class Pushed:
    """Every piece was handed to the wire, and the sender's blocks are not read any more."""

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
    """No byte of the push will be sent any more, and the sender's blocks are not read any more."""

    push_id: int


TransportEvent = Landed | InboundFailed | InboundFenced | Pushed | PushFailed | PushFenced


@dataclass(slots=True)
class TransportTotals:
    """Since the start."""

    num_received_pieces: int = 0
    num_received_bytes: int = 0
    receive_seconds: float = 0.0  # while bytes of pieces came in
    num_stray_pieces: int = 0  # of no open transfer: drained and discarded
    num_corrupt_pieces: int = 0
    num_bad_connections: int = 0  # spoke something else
    num_sent_pieces: int = 0
    num_sent_bytes: int = 0
    send_seconds: float = 0.0  # while bytes of pieces went out
    num_refused: int = 0  # connections of senders that were told no
    num_strangers: int = 0  # those among them that did not show this receiver's key
    num_fallbacks: int = 0  # connections that another kind had to serve


class Transport(Protocol):
    """Moves pieces of KV from a sender's blocks to a receiver's."""

    fences_locally: bool  # the receiver can stop a peer's writes alone, without hearing of the peer

    @property
    def addresses(self) -> list[kv_pb2.TransportAddress]:
        """Where this worker takes KV: one for each kind, best first."""

    def poll(self) -> list[TransportEvent]:
        """What happened since the last call, in order."""

    def totals(self) -> TransportTotals:
        """As of now, all kinds together."""

    def totals_by_kind(self) -> dict[str, TransportTotals]:
        """As of now, of each kind that this worker has: tcp, ipc, rdma, nccl."""

    def close(self) -> None:
        """Ends every transfer and thread. Idempotent."""

    # The receiver's verbs.

    def open(self, inbound: Inbound) -> None:
        """Pieces of this transfer are written from now on, until it landed, failed or is fenced."""

    def num_landed_bytes(self, transfer_id: int) -> int:
        """How much of an open transfer has arrived."""

    def fence_inbound(self, transfer_id: int) -> None:
        """Stops writes. InboundFenced follows, for unknown transfers too."""

    def cut_inbound(self, transfer_id: int) -> None:
        """Stops writes at the cost of whatever else uses the way to this peer. InboundFenced follows soon."""

    # The sender's verbs.

    def connect(self, outbound: Outbound) -> None:
        """Begins a push; dials where needed.

        Raises InvalidRequest for an address that is none, Mismatch where the two ends have no transport in common.
        """

    def push(self, push_id: int, piece: Piece) -> None:
        """Queues one piece, or starts it. Ignored for an unknown push."""

    def finish(self, push_id: int) -> None:
        """That was the last piece. Pushed follows when all are sent."""

    def fence_outbound(self, push_id: int) -> None:
        """Drops pieces that wait; one that is being sent is finished. PushFenced follows, for unknown pushes too."""

    def cut_outbound(self, push_id: int) -> None:
        """Cuts the connection, at the cost of whatever else uses it. PushFenced follows soon."""

    def forget(self, push_id: int) -> None:
        """The push is fenced or complete, and is not named any more. Idempotent."""
