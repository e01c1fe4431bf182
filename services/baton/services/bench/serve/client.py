"""The interface of a server under load, for any protocol. Knows no load and no statistics."""

from __future__ import annotations

from typing import Any, Protocol

from baton.services.bench.datasets.source import DatasetPrompt
from baton.services.bench.serve.stats import Record


class Client(Protocol):
    """A client of one server. Raises BenchFailed if the server cannot be used."""

    async def describe(self) -> str:
        """Reads the server's model. Returns its name."""

    async def token_pool(self) -> list[int]:
        """Returns the token ids for prompts."""

    async def count_tokens(self, text: str) -> int:
        """Returns the number of prompt tokens of a chat with this one message."""

    def encode(self, prompt: DatasetPrompt) -> Any:
        """Returns the encoded request, before its time is measured."""

    async def send(self, request: Any, record: Record) -> None:
        """Sends a request and reads its answer. Stores any failure as the record's error."""

    async def close(self) -> None:
        """Closes all connections."""
