"""Weights updated from tensors, on the engine's side: start, any number of parts, finish. One update at a time."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from baton.rpc.errors import Mismatch, Unsupported
from baton.v1 import control_pb2
from baton.worker.executors.base import NewWeights, Resident
from baton.worker.link.inbox import Inbox
from baton.worker.process.lifecycle import Lifecycle, Refuse, Reply

if TYPE_CHECKING:
    from baton.worker.weights.tensor_update import TensorUpdate

NUMBER = struct.Struct("<Q")  # of an object in the inbox


class WeightUpdates:
    """`inbox` None: the front is another process, whose tensors cannot be handed over."""

    def __init__(self, resident: Resident, lifecycle: Lifecycle, inbox: Inbox | None) -> None:
        self._resident = resident
        self._lifecycle = lifecycle
        self._inbox = inbox
        self._update: TensorUpdate | None = None

    def start(self, payload: bytes) -> bytes:
        """Begins an update. The engine continues with the present weights."""
        if self._inbox is None:
            raise Unsupported("weights are updated from tensors only within one process")
        if self._update is not None:
            raise Mismatch("a weight update has begun already: finish it first")
        self._update = self._resident.new_update()
        return b""

    def add(self, payload: bytes) -> bytes:
        """Adds the tensors of an object in the inbox."""
        assert self._inbox is not None, "the front puts tensors into it"
        tensors = self._inbox.take(*NUMBER.unpack(payload))
        self._begun().add(tensors)
        return b""

    def finish(self, payload: bytes, reply: Reply, refuse: Refuse) -> None:
        """Replaces the weights, as a reload does. The update ends, whether that succeeds or not."""
        update, self._update = self._begun(), None

        def read() -> NewWeights:
            return self._resident.read_update(update)

        request = control_pb2.ReloadWeightsRequest.FromString(payload)
        self._lifecycle.reload(request, reply, refuse, read)

    def _begun(self) -> TensorUpdate:
        if self._update is None:
            raise Mismatch("no weight update has begun: start one first")
        return self._update
