"""The engine: requests go in, steps run, tokens come out. Owns what runs when; knows no wire and no tensors.

Single-threaded: every method is called from the engine thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from baton.worker.block_pool import PoolAudit, RemovedEvent, StoredEvent
from baton.worker.core import BlockId, Request, TokenLogprobs
from baton.worker.executor.base import Executor
from baton.worker.outputs import EngineCounters, LoadSnapshot, PrefillStarted, StepOutputs
from baton.worker.settings import EngineSettings


class Engine:
    """Scheduler, block pool and executor, tied together."""

    epoch: int  # of the cache; new at every reset_prefix_cache
    max_model_len: int  # the model's, or what the pool can hold at most
    # Called between schedule and launch, so that a peer can be told before its prompt is computed.
    on_prefill_started: Callable[[PrefillStarted], None] | None

    def __init__(
        self, executor: Executor, settings: EngineSettings, epoch: int, clock: Callable[[], float] = time.monotonic
    ) -> None: ...

    def submit(self, request: Request) -> None:
        """Takes a request. Raises InvalidRequest where it can never run, NoCapacity where the queue is full."""

    def abort(self, request_id: str) -> None:
        """Ends a request: a Finish with ABORT is in the next outputs, leased blocks stay until free_lease. Idempotent."""

    def step(self) -> StepOutputs:
        """Schedules, launches, collects and updates once. Returns at once, empty, when nothing can run."""

    def has_work(self) -> bool:
        """Whether step() would do anything now. A wait for a remote prefill does not count."""

    def next_deadline(self) -> float | None:
        """When step() must be called at the latest, on the engine's clock, for a request's deadline."""

    def load(self) -> LoadSnapshot: ...

    def counters(self) -> EngineCounters:
        """A copy of the totals."""

    def audit(self) -> PoolAudit:
        """Walks the whole pool. Raises DataLoss where it contradicts itself or the requests."""

    def take_events(self) -> list[StoredEvent | RemovedEvent]:
        """What changed in the cache since the last call, in order."""

    def cached_hashes(self) -> bytes:
        """Everything that can be found now, 16 bytes a block; take_events first for a consistent snapshot."""

    def reset_prefix_cache(self) -> int:
        """Forgets every cached block; pending events go too. Returns the new epoch. Running requests keep their blocks."""

    # The decode side of a hand-over. The request was listed in StepOutputs.prefill_wanted.

    def reserve_blocks(self, request_id: str) -> list[BlockId] | None:
        """Leases the rest of the prompt's blocks. None: no room now; try again after a step, or prefill locally."""

    def accept_first_token(self, request_id: str, token_id: int, logprobs: TokenLogprobs | None = None) -> None:
        """Takes the prefill worker's token: it goes out with the next outputs, and may finish the request.

        Ignored for a request that has ended or has gone on without it.
        """

    def finish_transfer(self, request_id: str) -> None:
        """Ends the lease: the blocks are valid and cached, the request runs. Without a first token yet, it
        computes the prompt's last token itself. For a request that has ended, the same as free_lease."""

    def prefill_locally(self, request_id: str) -> None:
        """Gives up on the remote prefill, after the fence: leased blocks are freed, the request queues here."""

    def free_lease(self, request_id: str) -> None:
        """After a finish, failure or abort with an open lease: the fence is done, the blocks are free. Idempotent."""

    # The prefill side of a hand-over.

    def free_prefill(self, request_id: str) -> None:
        """Frees a computed prefill_only request's blocks. Idempotent."""

    def block_ids(self, request_id: str) -> list[BlockId]:
        """A copy of the request's block table, leased blocks included. Empty for an unknown request."""


__all__ = ["Engine", "EngineSettings", "PrefillStarted", "StepOutputs"]
