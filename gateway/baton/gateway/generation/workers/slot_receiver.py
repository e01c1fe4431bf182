"""What a worker's stream tells the requests on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from baton.rpc.errors import ServiceError
from baton.v1 import types_pb2, worker_pb2


class SlotReceiver(Protocol):
    """A request on the stream. Called synchronously; after on_finish or on_failure never again."""

    def on_prompt_logprobs(self, first_position: int, entries: Sequence[types_pb2.TokenLogprobs]) -> None:
        """Log-probabilities of the prompt's tokens from this place on; only where asked for."""

    def on_tokens(self, token_ids: Sequence[int], logprobs: Sequence[types_pb2.TokenLogprobs] | None) -> None:
        """One step's new tokens."""

    def on_stall(self) -> None:
        """The worker's device is stuck; it is told again while that lasts. Tokens may still come."""

    def on_prefill_lost(self, worker_id: str, message: str) -> None:
        """A prefill worker died while it computed the prompt for this worker, which goes on by itself."""

    def on_finish(self, finish: worker_pb2.SlotFinish) -> None:
        """The worker is done with it; also the answer to an abort."""

    def on_failure(self, error: ServiceError) -> None:
        """The worker gave it up, or is lost."""


class IgnoredSlot:
    """Holds a slot whose request is no longer wanted."""

    def on_prompt_logprobs(self, first_position: int, entries: Sequence[types_pb2.TokenLogprobs]) -> None:
        pass

    def on_tokens(self, token_ids: Sequence[int], logprobs: Sequence[types_pb2.TokenLogprobs] | None) -> None:
        pass

    def on_stall(self) -> None:
        pass

    def on_prefill_lost(self, worker_id: str, message: str) -> None:
        pass

    def on_finish(self, finish: worker_pb2.SlotFinish) -> None:
        pass

    def on_failure(self, error: ServiceError) -> None:
        pass
