"""The rdma transport's bulk path: NIXL over UCX, with one-sided writes into the receiver's slots. See nixl.

It uses any fabric that UCX finds, and TCP if there is none. UCX listens on ports of its own, on all networks, without
authentication: over TCP, a host that reaches a port can write anywhere in the process. The network between workers must
be trusted; UCX_NET_DEVICES and UCX_TCP_PORT_RANGE restrict it.
"""

from __future__ import annotations

import secrets
import threading

from baton.rpc.errors import Mismatch, NoCapacity, Unavailable
from baton.worker.transfer.bulk import Slots
from baton.worker.transfer.kinds.rdma.descriptors import check_offer, decode_region, encode_offer
from baton.worker.transfer.kinds.rdma.nixl import Agent, load
from baton.worker.transfer.kinds.rdma.receiver import RdmaReceiver, ReceivingAgent
from baton.worker.transfer.kinds.rdma.sender import RdmaSender
from baton.worker.transfer.kinds.rdma.staging import Region, Staging

NUM_SLOTS = 4
_MAX_PEERS = 32
_MAX_SLOTS = 64
_MAX_SLOT_BYTES = 1 << 30


class RdmaPath:
    """A BulkPath. `copy_seconds`: the limit for the copy of one piece."""

    def __init__(
        self,
        staging: Staging,
        slot_bytes: int,
        *,
        num_slots: int = NUM_SLOTS,
        max_peers: int = _MAX_PEERS,
        copy_seconds: float = 5.0,
        connect_seconds: float = 2.0,
    ) -> None:
        """Raises Unsupported without NIXL, Unavailable if it finds no network."""
        self._nixl = load(staging.cuda_major)
        self._staging = staging
        self._slot_bytes = slot_bytes
        self._num_slots = num_slots
        self._max_peers = max_peers
        self._copy_seconds = copy_seconds
        self._connect_seconds = connect_seconds
        self._lock = threading.Lock()
        self._num_senders = 0
        self._closed = False
        self._receiving = self._make_receiving()

    def offer(self) -> bytes:
        """Returns the version. Whether the slots can be reached shows when a sender connects."""
        return encode_offer()

    def accept(self, offer: bytes) -> RdmaReceiver:
        """Returns the receiver's end. Raises Mismatch for another version, NoCapacity if all regions are in use."""
        check_offer(offer)
        with self._lock:
            self._check_open()
            if self._receiving.is_spent:
                self._receiving.close()
                self._receiving = self._make_receiving()
            receiving = self._receiving
            region, blob = receiving.take()

        def closed(region: Region, sender_gone: bool) -> None:
            with self._lock:
                (receiving.give_back if sender_gone else receiving.mark_lost)(region)

        return RdmaReceiver(self._staging, region, Slots(self._num_slots, self._slot_bytes, blob), closed)

    def connect(self, slots: Slots) -> RdmaSender:
        """Returns the sender's end. Raises Mismatch for unusable slots, Unavailable if the receiver cannot be reached,
        NoCapacity above the limit of connections."""
        if not 0 < slots.num_slots <= _MAX_SLOTS or not 0 < slots.slot_bytes <= _MAX_SLOT_BYTES:
            raise Mismatch(
                f"the receiver has {slots.num_slots} slots of {slots.slot_bytes} bytes; the maximum is {_MAX_SLOTS} of "
                f"{_MAX_SLOT_BYTES}"
            )
        remote = decode_region(slots.blob, slots.num_slots * slots.slot_bytes)
        self._count_sender()
        try:
            agent = Agent(self._nixl, _fresh_name())
        except BaseException:
            self._forget_sender()
            raise
        return RdmaSender(
            agent, self._staging, slots, remote, self._copy_seconds, self._connect_seconds, self._forget_sender
        )

    def close(self) -> None:
        """Ends the receivers; the owners of senders close those."""
        with self._lock:
            self._closed = True
            self._receiving.close()

    def _make_receiving(self) -> ReceivingAgent:
        region_bytes = self._num_slots * self._slot_bytes
        return ReceivingAgent(self._nixl, _fresh_name(), self._staging, region_bytes, self._max_peers)

    def _count_sender(self) -> None:
        with self._lock:
            self._check_open()
            if self._num_senders >= self._max_peers:
                raise NoCapacity(f"{self._max_peers} rdma connections are open, the maximum", retry_after_ms=1000)
            self._num_senders += 1

    def _forget_sender(self) -> None:
        with self._lock:
            self._num_senders -= 1

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable("the rdma transport is closed")


def _fresh_name() -> str:
    """Returns a name that no process has used before: a restarted peer is a different agent."""
    return f"baton-{secrets.token_hex(16)}"
