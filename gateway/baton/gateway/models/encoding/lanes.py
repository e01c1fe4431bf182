"""Where prompts are encoded: short ones at once, longer ones on threads, the longest in helper processes."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from baton.gateway.fairness.fair_threads import FairThreads
from baton.gateway.models.encoding.messages import Setup
from baton.gateway.models.encoding.prompt_encoder import ChatPrompt, PromptEncoder, TextPrompt
from baton.gateway.models.encoding.remote_encoder import RemoteEncoder
from baton.gateway.models.tokenization.encoding_limit import EncodingLimit

# Rendering and encoding a shorter prompt takes less time than a thread switch.
_INLINE_CHARS = 1024
# Rendering and encoding a longer one holds the interpreter's lock for milliseconds.
_REMOTE_CHARS = 64 << 10
_NUM_PROCESSES = 2
_UNKNOWN_COST = 1 << 20
_BEGINNING_CHARS = 1024
_ROLE_CHARS = 16  # a message's role and kinds are shorter than its text


class PromptLanes:
    """Encodes a model's prompts without blocking the event loop. `setup` None: no helper processes."""

    def __init__(self, encoder: PromptEncoder, setup: Setup | None = None) -> None:
        self._encoder = encoder
        self._remote = [] if setup is None else [_RemoteLane(encoder, setup) for _ in range(_NUM_PROCESSES)]

    async def encode(self, prompt: TextPrompt | ChatPrompt, owner: str, limit: EncodingLimit) -> list[int]:
        """Returns the token ids. Raises as PromptEncoder.encode."""
        size = prompt.num_chars
        if size is not None and size <= _INLINE_CHARS:
            return self._encoder.encode(prompt, owner, limit)
        if self._remote and (size is None or size > _REMOTE_CHARS):
            return await self._lane_of(prompt, owner).encode(prompt, owner, limit, size or _UNKNOWN_COST)
        work = partial(self._encoder.encode, prompt, owner)
        return await self._encoder.tokenizer.run_limited(work, limit, size or 0, owner)

    async def assistant_mask(
        self, prompt: ChatPrompt, token_ids: Sequence[int], owner: str, limit: EncodingLimit
    ) -> list[int]:
        """Returns which tokens of an encoded chat are the assistant's. Raises as PromptEncoder.assistant_mask."""
        work = partial(self._encoder.assistant_mask, prompt, token_ids, owner)
        return await self._encoder.tokenizer.run_limited(work, limit, prompt.num_chars or 0, owner)

    def close(self) -> None:
        """Ends the helper processes. Idempotent."""
        for lane in self._remote:
            lane.close()

    def _lane_of(self, prompt: TextPrompt | ChatPrompt, owner: str) -> _RemoteLane:
        """Returns the lane whose cache may have the prompt's beginning."""
        texts = (prompt.text,) if isinstance(prompt, TextPrompt) else _texts(prompt.messages)
        first = next((text for text in texts if len(text) > _ROLE_CHARS), "")
        beginning = f"{owner} {first[:_BEGINNING_CHARS]}".encode(errors="replace")
        return self._remote[zlib.crc32(beginning) % len(self._remote)]


class _RemoteLane:
    """One helper process, and the thread that waits for it."""

    def __init__(self, encoder: PromptEncoder, setup: Setup) -> None:
        self._encoder = encoder
        self._remote = RemoteEncoder(setup)
        self._threads = FairThreads(1, "encode long")

    async def encode(self, prompt: TextPrompt | ChatPrompt, owner: str, limit: EncodingLimit, cost: int) -> list[int]:
        stop = threading.Event()
        try:
            work = partial(self._encode, prompt, owner, replace(limit, stopped=stop.is_set))
            return await self._threads.run(work, owner, cost)
        finally:
            stop.set()

    def _encode(self, prompt: TextPrompt | ChatPrompt, owner: str, limit: EncodingLimit) -> list[int]:
        token_ids = self._remote.encode(prompt, owner, limit)
        return self._encoder.encode(prompt, owner, limit) if token_ids is None else token_ids

    def close(self) -> None:
        self._threads.close()
        self._remote.close()


def _texts(value: object) -> Iterator[str]:
    """Yields the texts of nested values, in order."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from _texts(item)
