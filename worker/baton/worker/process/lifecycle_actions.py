"""Carries out lifecycle changes on one worker's parts."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from baton.v1 import types_pb2, worker_pb2
from baton.worker.engine.engine import Engine
from baton.worker.executors.base import NewWeights, Resident
from baton.worker.executors.memory_part import MemoryPart
from baton.worker.handover.handover import Handover
from baton.worker.link.ends import EngineEnd
from baton.worker.link.frames import Kind
from baton.worker.process.control import ControlTarget
from baton.worker.transfer.layout import layout_message

_HEARTBEAT_SECONDS = 0.25


class EngineLifecycleActions:
    """Implements lifecycle.LifecycleActions. Updates `identity`, the state that the worker reports of itself.

    `end_drain` makes sessions accept new requests again.
    """

    def __init__(
        self,
        target: ControlTarget,
        engine: Engine,
        resident: Resident,
        handover: Handover,
        identity: worker_pb2.WorkerState,
        link: EngineEnd,
        end_drain: Callable[[], None],
    ) -> None:
        self._target = target
        self._engine = engine
        self._resident = resident
        self._handover = handover
        self._identity = identity
        self._link = link
        self._end_drain = end_drain

    def begin_drain(self) -> None:
        self._target.begin_drain()

    def end_drain(self) -> None:
        self._handover.end_drain()
        self._end_drain()

    def abort_all(self, reason: str) -> None:
        self._target.abort_all(reason)

    def abort_prefills(self, reason: str) -> None:
        self._handover.abort_all(reason)

    def num_requests(self) -> int:
        return self._target.num_requests()

    def num_open_transfers(self) -> int:
        return self._handover.num_open

    def freeze(self, frozen: bool) -> None:
        self._engine.frozen = frozen

    def settled(self) -> bool:
        return self._engine.settled and not self._handover.num_open

    def epoch(self) -> int:
        return self._engine.epoch

    def forget_blocks(self) -> int:
        self._engine.recompute_all()
        return self._target.reset_prefix_cache()

    def read_weights(self, model: str) -> NewWeights:
        return self._resident.read_weights(model)

    def use_weights(self, new: NewWeights) -> None:
        with self._heartbeats():
            self._resident.use_weights(new)
        self._adopt()

    def sleep(self, level: int) -> int:
        with self._heartbeats():
            return self._resident.sleep(level)

    def wake(self, new: NewWeights | None, parts: frozenset[MemoryPart]) -> None:
        with self._heartbeats():
            self._resident.wake(new, parts)
        if new is not None:
            self._adopt()

    def switch_role(self, role: types_pb2.WorkerRole.ValueType) -> types_pb2.WorkerRole.ValueType:
        before, self._identity.role = self._identity.role, role
        return before

    def wake_loop(self) -> None:
        self._link.wake()

    def _adopt(self) -> None:
        """Updates everything that reports the weights in use."""
        spec = self._resident.kv_spec
        self._identity.model.digest = spec.model_digest
        self._identity.layout.CopyFrom(layout_message(spec))
        self._handover.adopt(spec)

    @contextlib.contextmanager
    def _heartbeats(self) -> Iterator[None]:
        """Sends the state at an interval: moving memory can take longer than the front's step timeout."""
        state = worker_pb2.WatchStateResponse(state=self._target.state()).SerializeToString()
        done = threading.Event()

        def send_states() -> None:
            while not done.wait(_HEARTBEAT_SECONDS):
                self._link.post(Kind.STATE, 0, state)

        thread = threading.Thread(target=send_states, name="heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
