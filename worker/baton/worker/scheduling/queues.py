"""The batch and the queues of requests. Decides nothing."""

from __future__ import annotations

from baton.worker.requests.state import RequestState
from baton.worker.scheduling.steps.batch import Batch
from baton.worker.scheduling.waiting_queue import WaitingQueue


class RequestQueues:
    """All requests that have not ended and do not wait for a prefix. Each is in one queue, or in the batch."""

    def __init__(self, num_rows: int, max_step_tokens: int, max_masked_tokens: int = 1, decode_span: int = 0) -> None:
        self.batch = Batch(num_rows, max_step_tokens, max_masked_tokens, decode_span)
        self.waiting = WaitingQueue()
        self.aside = WaitingQueue()  # long prompts that others pass, until one more may start
        self.ready = WaitingQueue()  # admitted before waiting ones: they hold blocks that others may wait for
        self.remote: dict[RequestState, None] = {}  # in phase REMOTE, in order
        self.compiling: set[RequestState] = set()  # in phase LOADING or COMPILING
        self.stalled = False  # the last schedule found nothing that fits, and nothing has changed since

    @property
    def num_waiting(self) -> int:
        """Requests without a row that need one."""
        return self.num_queued + len(self.remote) + len(self.compiling)

    @property
    def num_queued(self) -> int:
        """Requests without a row that would get one now if there were capacity."""
        return len(self.waiting) + len(self.aside) + len(self.ready)

    @property
    def has_prompts(self) -> bool:
        """Whether a step may have prefill tokens."""
        return bool(self.batch.prefilling) or self.num_queued > 0

    def may_admit(self) -> bool:
        """Returns whether an attempt to admit one of them may succeed."""
        return self.num_queued > 0 and not self.stalled

    def list_waiting(self) -> list[RequestState]:
        """Returns the requests of num_waiting."""
        return [*self.waiting, *self.aside, *self.ready, *self.remote, *self.compiling]

    def must_fit(self) -> list[RequestState]:
        """Returns requests that run, or will run without another check of capacity."""
        leasing = [state for state in self.remote if state.leased]
        return [*self.batch.running(), *self.ready, *leasing]

    def dequeue(self, state: RequestState) -> None:
        """Removes a request from every queue, but not from the batch."""
        self.waiting.discard(state)
        self.aside.discard(state)
        self.ready.discard(state)
        self.remote.pop(state, None)
        self.compiling.discard(state)
