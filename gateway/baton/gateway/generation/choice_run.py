"""One choice on one worker: passes events of the worker's stream to the choice and to its request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from baton.gateway.generation.output.choice import Choice
from baton.gateway.generation.output.delta_buffer import DeltaBuffer
from baton.gateway.generation.placement import PlacementUse
from baton.gateway.generation.retry_budget import Loss, loss_of
from baton.gateway.generation.workers.stream import WorkerStream
from baton.rpc.errors import InternalError, ServiceError, Unavailable
from baton.v1 import types_pb2, worker_pb2

_FINISH_REASONS = {types_pb2.FINISH_REASON_STOP: "stop", types_pb2.FINISH_REASON_LENGTH: "length"}


class ChoiceOwner(Protocol):
    """The interface of a request that its choices' runs call."""

    deltas: DeltaBuffer

    def take(
        self, choice: Choice, token_ids: Sequence[int], logprobs: Sequence[types_pb2.TokenLogprobs] | None
    ) -> None:
        """Receives a choice's new tokens."""

    def stop_early(self, run: ChoiceRun) -> None:
        """Aborts a choice on its worker after a stop string."""

    def find_better(self, run: ChoiceRun) -> None:
        """Looks for another worker because the device of this one is stalled."""

    def lose_prefill(self, run: ChoiceRun, worker_id: str, message: str) -> None:
        """Handles the death of a prefill worker that computed the choice's prompt."""

    def waited(self, queue_us: int) -> None:
        """Receives how long a choice waited in its worker before it was computed."""

    def settle(self, run: ChoiceRun, num_cached_tokens: int | None) -> None:
        """Receives a finished choice's token counts; None if they will not arrive."""

    def lose(self, run: ChoiceRun, error: ServiceError) -> None:
        """Moves the choice to another worker, or fails the request."""


class ChoiceRun:
    """Implements SlotReceiver for one choice on one worker."""

    __slots__ = ("_generation", "_num_before", "choice", "slot", "stream", "use", "waits")

    def __init__(self, generation: ChoiceOwner, choice: Choice, use: PlacementUse, stream: WorkerStream) -> None:
        self._generation = generation
        self._num_before = len(choice.output_token_ids)
        self.choice = choice
        self.use = use
        self.stream = stream
        self.slot = -1
        self.waits = False  # whether it waits for tokens from a stalled device

    def on_prompt_logprobs(self, first_position: int, entries: Sequence[types_pb2.TokenLogprobs]) -> None:
        if self.choice.prompt_logprobs is not None:
            self.choice.prompt_logprobs.take(first_position, entries)

    def on_tokens(self, token_ids: Sequence[int], logprobs: Sequence[types_pb2.TokenLogprobs] | None) -> None:
        choice = self.choice
        self.waits = False
        if self.use.waits:
            self.use.first_token()
        # Tokens that were in flight when a stop string matched or the client disconnected.
        if choice.finished:
            return
        self._generation.take(choice, token_ids, logprobs)
        if choice.finished:
            self._generation.stop_early(self)

    def on_pooled(self, pooled: worker_pb2.SlotPooled) -> None:
        raise InternalError(f"worker {self.stream.worker_id} sent vectors for a generation")

    def on_stall(self) -> None:
        self._generation.find_better(self)

    def on_prefill_lost(self, worker_id: str, message: str) -> None:
        self._generation.lose_prefill(self, worker_id, message)

    def leave(self) -> None:
        """Leaves the worker without waiting for its reply."""
        self.stream.leave(self.slot)
        self._close(None, worker_failed=True)

    def on_finish(self, finish: worker_pb2.SlotFinish) -> None:
        cached = finish.num_cached_tokens + finish.num_prefill_cached_tokens
        if not self.choice.finished and finish.reason not in _FINISH_REASONS:
            error = Unavailable(
                f"worker {self.stream.worker_id} aborted the request",
                phase=types_pb2.PHASE_DECODE,
                worker_id=self.stream.worker_id,
            )
            self.on_failure(error)
            return
        self._generation.waited(finish.queue_us)
        self.use.finished(finish, len(self.choice.output_token_ids) - self._num_before)
        self._close(cached, worker_failed=False)
        if not self.choice.finished:
            stop_token_id = finish.stop_token_id if finish.HasField("stop_token_id") else None
            self._generation.deltas.emit(self.choice.end(_FINISH_REASONS[finish.reason], stop_token_id))
        self._generation.settle(self, cached)

    def on_failure(self, error: ServiceError) -> None:
        self._close(None, worker_failed=loss_of(error) is not Loss.REFUSED)
        if self.choice.finished:
            self._generation.settle(self, None)
        else:
            self._generation.lose(self, error)

    def _close(self, cached: int | None, worker_failed: bool) -> None:
        self.use.done(len(self.choice.output_token_ids) - self._num_before, cached, worker_failed)
