"""What a load needs of a server, whatever the protocol. Knows no load and no statistics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from bench.serve.stats import Record


class BenchFailed(Exception):
    """The benchmark cannot go on. The message is for the user."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, or the text of a chat's one message."""

    num_tokens: int
    num_output: int
    seed: int
    token_ids: tuple[int, ...] = ()
    text: str = ""


class Client(Protocol):
    """One server. Raises BenchFailed where it cannot be used at all."""

    async def describe(self) -> str:
        """Asks for the server's model; returns its name."""

    async def token_pool(self) -> list[int]:
        """Token ids that prompts may be made of."""

    async def count_tokens(self, text: str) -> int:
        """Of a chat's prompt with this one message."""

    def encode(self, prompt: Prompt) -> Any:
        """The request as it goes out, made before the clock starts."""

    async def send(self, request: Any, record: Record) -> None:
        """Sends a request and takes its answer. Whatever goes wrong is the record's error."""

    async def close(self) -> None:
        """Closes every connection."""
