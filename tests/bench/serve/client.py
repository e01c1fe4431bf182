"""The interface of a server under load, for any protocol. Knows no load and no statistics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from bench.serve.stats import Record


class BenchFailed(Exception):
    """The benchmark cannot continue. The message is for the user."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, or the text of a chat's only message."""

    num_tokens: int
    num_output: int
    seed: int
    token_ids: tuple[int, ...] = ()
    text: str = ""


class Client(Protocol):
    """A client of one server. Raises BenchFailed if the server cannot be used."""

    async def describe(self) -> str:
        """Reads the server's model. Returns its name."""

    async def token_pool(self) -> list[int]:
        """Returns the token ids for prompts."""

    async def count_tokens(self, text: str) -> int:
        """Returns the number of prompt tokens of a chat with this one message."""

    def encode(self, prompt: Prompt) -> Any:
        """Returns the encoded request, before its time is measured."""

    async def send(self, request: Any, record: Record) -> None:
        """Sends a request and reads its answer. Stores any failure as the record's error."""

    async def close(self) -> None:
        """Closes all connections."""
