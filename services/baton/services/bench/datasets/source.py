"""The prompts of a benchmark, and what makes them. Knows no server and no engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class BenchFailed(Exception):
    """The benchmark cannot continue. The message is for the user."""


@dataclass(frozen=True, slots=True)
class DatasetPrompt:
    """Token ids, or the text of a chat's only message or of a completion."""

    num_tokens: int  # 0: unknown
    num_output: int
    seed: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    at: float | None = None  # seconds after the first request, of a trace
    several: tuple[DatasetPrompt, ...] = ()  # the texts of a request for embeddings, in place of all above


class Vocabulary(Protocol):
    """What datasets ask of a model. Raises BenchFailed."""

    async def token_pool(self) -> list[int]:
        """Returns the token ids for prompts."""

    async def count_tokens(self, text: str) -> int:
        """Returns the number of prompt tokens of a chat with this one message."""


class Dataset(Protocol):
    """A source of prompts."""

    @property
    def size(self) -> int | None:
        """Returns the number of its prompts; None: as many as are asked for."""

    async def prepare(self) -> None:
        """Reads what it needs. Raises BenchFailed."""

    async def make(self) -> DatasetPrompt | None:
        """Returns the next prompt; None at the end of a trace."""
