"""The interface of proposers, which plugins implement. Version 1."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from baton.worker.core import Int32


@dataclass(frozen=True, slots=True)
class ProposerContext:
    """What a proposer knows of its worker."""

    vocab_size: int
    max_model_len: int  # tokens of prompt and output
    num_rows: int  # requests of a batch, at most


class TokenProposer(ABC):
    """Guesses the next tokens of requests. An entry point names a subclass.

    It is made, and always called, in one thread of its own. What it guesses changes no output: wrong guesses cost time.
    """

    def __init__(self, context: ProposerContext) -> None:
        """Raises if it cannot work: the worker then does not start."""
        self.context = context

    def admit(self, row: int, prompt_token_ids: Int32, namespace: bytes) -> None:  # noqa: B027 - optional
        """Begins a request in a row that is free. A guess of a request may depend on tokens of requests of the same
        namespace alone: others would see it in the time of their steps."""

    def free(self, row: int, output_token_ids: Int32) -> None:  # noqa: B027 - optional
        """Ends the request of a row."""

    @abstractmethod
    def propose(self, row: int, token_ids: Int32, most: int) -> Sequence[int] | Int32:
        """Returns up to `most` tokens that may follow all of the row's tokens. Must be fast: the step waits for it.

        If it raises, or does not return in time, its request goes on without guesses.
        """
