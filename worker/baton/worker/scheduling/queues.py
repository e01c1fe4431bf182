"""Where requests stand: in the batch, in a queue, or waiting for somebody else. Decides nothing."""

from __future__ import annotations

from baton.worker.requests.state import RequestState
from baton.worker.scheduling.batch import Batch
from baton.worker.scheduling.waiting_queue import WaitingQueue


class RequestQueues:
    """All requests that neither ended nor wait for a prefix. Each is in one place."""

    def __init__(self, num_rows: int, max_step_tokens: int) -> None:
        self.batch = Batch(num_rows, max_step_tokens)
        self.waiting = WaitingQueue()
        self.ready = WaitingQueue()  # admitted before all that wait: they hold blocks that others may wait for
        self.remote: dict[RequestState, None] = {}  # in phase REMOTE, in order
        self.compiling: set[RequestState] = set()  # in phase COMPILING

    @property
    def num_waiting(self) -> int:
        """Requests that have no row and want one."""
        return len(self.waiting) + len(self.ready) + len(self.remote) + len(self.compiling)

    @property
    def num_queued(self) -> int:
        """Those of them that could have one now if there were room."""
        return len(self.waiting) + len(self.ready)

    def list_waiting(self) -> list[RequestState]:
        """The requests of num_waiting."""
        return [*self.waiting, *self.ready, *self.remote, *self.compiling]

    def must_fit(self) -> list[RequestState]:
        """Requests that run, or will without asking for room again."""
        leasing = [state for state in self.remote if state.leased]
        return [*self.batch.running(), *self.ready, *leasing]

    def dequeue(self, state: RequestState) -> None:
        """Takes a request out of every place but the batch."""
        self.waiting.discard(state)
        self.ready.discard(state)
        self.remote.pop(state, None)
        self.compiling.discard(state)
