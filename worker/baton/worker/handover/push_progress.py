"""Which blocks of one prompt are computed, layer by layer, and which of them have been handed to the transport."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.worker.core import BlockId


@dataclass(frozen=True, slots=True)
class PushTarget:
    """Where the pieces go. Its calls may come from any thread, and do not wait."""

    first_block: int  # of the prompt; those before are with the receiver
    max_blocks: int  # of one piece
    push: Callable[[int, int, Sequence[BlockId]], None]  # layer, index from first_block on, our blocks
    finish: Callable[[], None]


class PushProgress:
    """Told of computed layers by the executor's thread, of the target by the engine's. Every block goes once."""

    def __init__(
        self, num_layers: int, block_size: int, num_tokens: int, num_cached_tokens: int, block_ids: Sequence[BlockId]
    ) -> None:
        self._num_tokens = num_tokens
        self._block_size = block_size
        self._block_ids = list(block_ids)
        self._num_computed = [num_cached_tokens] * num_layers  # tokens
        self._num_pushed: list[int] = []  # blocks from the prompt's first on, once there is a target
        self._target: PushTarget | None = None
        self._finished = False
        self._lock = threading.Lock()

    @property
    def num_blocks(self) -> int:
        """Of the whole prompt."""
        return len(self._block_ids)

    def start(self, target: PushTarget) -> None:
        """Pushes what is computed, and from now on what will be."""
        with self._lock:
            self._target = target
            self._num_pushed = [target.first_block] * len(self._num_computed)
            for layer in range(len(self._num_computed)):
                self._push(layer)
            self._finish_if_all()

    def layer_computed(self, layer: int, num_tokens: int) -> None:
        """This layer's KV of the prompt's first num_tokens tokens is in its blocks."""
        with self._lock:
            self._advance(layer, num_tokens)
            self._finish_if_all()

    def all_computed(self, num_tokens: int) -> None:
        """Every layer's is."""
        with self._lock:
            for layer in range(len(self._num_computed)):
                self._advance(layer, num_tokens)
            self._finish_if_all()

    def _advance(self, layer: int, num_tokens: int) -> None:
        if num_tokens > self._num_computed[layer]:
            self._num_computed[layer] = num_tokens
            self._push(layer)

    def _push(self, layer: int) -> None:
        target = self._target
        if target is None:
            return
        start, stop = self._num_pushed[layer], self._num_ready(layer)
        for first in range(start, stop, target.max_blocks):
            block_ids = self._block_ids[first : min(first + target.max_blocks, stop)]
            target.push(layer, first - target.first_block, block_ids)
        self._num_pushed[layer] = max(start, stop)

    def _num_ready(self, layer: int) -> int:
        """Blocks that will not change any more. The last one may stay partial."""
        num_computed = self._num_computed[layer]
        if num_computed >= self._num_tokens:
            return len(self._block_ids)
        return num_computed // self._block_size

    def _finish_if_all(self) -> None:
        target = self._target
        if target is None or self._finished or min(self._num_pushed) < len(self._block_ids):
            return
        self._finished = True
        target.finish()
