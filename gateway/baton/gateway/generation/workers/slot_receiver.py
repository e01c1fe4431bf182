"""The interface between a worker's stream and the requests on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from baton.rpc.errors import ServiceError
from baton.v1 import types_pb2, worker_pb2


class SlotReceiver(Protocol):
    """A request on the stream. Called synchronously; not called again after on_finish or on_failure."""

    def on_prompt_logprobs(self, first_position: int, entries: Sequence[types_pb2.TokenLogprobs]) -> None:
        """Receives log-probabilities of the prompt's tokens from `first_position` on, if requested."""

    def on_tokens(self, token_ids: Sequence[int], logprobs: Sequence[types_pb2.TokenLogprobs] | None) -> None:
        """Receives the new tokens of one or more steps."""

    def on_pooled(self, pooled: worker_pb2.SlotPooled) -> None:
        """Receives the vectors of a text, before its finish."""

    def on_stall(self) -> None:
        """Called repeatedly while the worker's device is stalled. Tokens may still arrive."""

    def on_prefill_lost(self, worker_id: str, message: str) -> None:
        """Called when a prefill worker died while it computed the prompt; the decode worker continues on its own."""

    def on_finish(self, finish: worker_pb2.SlotFinish) -> None:
        """Called when the worker has ended the request, also after an abort."""

    def on_failure(self, error: ServiceError) -> None:
        """Called when the worker failed the request or was lost."""


class IgnoredSlot:
    """Implements SlotReceiver for the slot of a cancelled request."""

    def on_prompt_logprobs(self, first_position: int, entries: Sequence[types_pb2.TokenLogprobs]) -> None:
        pass

    def on_tokens(self, token_ids: Sequence[int], logprobs: Sequence[types_pb2.TokenLogprobs] | None) -> None:
        pass

    def on_pooled(self, pooled: worker_pb2.SlotPooled) -> None:
        pass

    def on_stall(self) -> None:
        pass

    def on_prefill_lost(self, worker_id: str, message: str) -> None:
        pass

    def on_finish(self, finish: worker_pb2.SlotFinish) -> None:
        pass

    def on_failure(self, error: ServiceError) -> None:
        pass
