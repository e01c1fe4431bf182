"""Which blocks of one prompt are computed, layer by layer, and which of them have been handed to the transport.

Counts in tokens on the sender's side and in blocks of the receiver's size on the other: a receiver's block goes out
when all of its tokens are computed, whichever of the sender's blocks they lie in.

    sender's blocks of 4      | 0 1 2 3 | 4 5 6 7 | 8 9 . . |       10 tokens
    receiver's blocks of 6    | 0 1 2 3   4 5 | 6 7   8 9 . . |     block 1: the sender's last two, 2 tokens skipped
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from baton.worker.core import BlockId
from baton.worker.transfer.base import Piece


class TargetGroup(NamedTuple):
    """Where the pieces of one group go."""

    first_block: int  # of the prompt, in the receiver's blocks; those before are with the receiver
    max_block_layers: int  # the most blocks times layers that one piece may have


@dataclass(frozen=True, slots=True)
class PushTarget:
    """Where the pieces go. Its calls may come from any thread, and do not wait."""

    block_size: int  # of the receiver, in tokens
    groups: Sequence[TargetGroup]
    push: Callable[[Piece], None]
    finish: Callable[[], None]


class SourceGroup(NamedTuple):
    """The prompt's blocks in one group."""

    layers: range  # KV layers
    block_ids: Sequence[BlockId]


class PushProgress:
    """Told of computed layers by the executor's thread, of the target by the engine's. Every block goes once."""

    def __init__(self, groups: Sequence[SourceGroup], block_size: int, num_tokens: int, num_cached_tokens: int) -> None:
        self._groups = [_GroupProgress(group, block_size, num_tokens, num_cached_tokens) for group in groups]
        self._num_tokens = num_tokens
        self._target: PushTarget | None = None
        self._finished = False
        self._lock = threading.Lock()

    @property
    def num_blocks(self) -> int:
        """Of the whole prompt, of the sender's size."""
        return len(self._groups[0].source.block_ids)

    def num_blocks_of(self, block_size: int) -> int:
        """Of the whole prompt, of that size."""
        return -(-self._num_tokens // block_size)

    def start(self, target: PushTarget) -> None:
        """Pushes what is computed, and from now on what will be."""
        with self._lock:
            self._target = target
            for group, to in zip(self._groups, target.groups, strict=True):
                group.start(target, to)
            self._finish_if_done(target)

    def layer_computed(self, layer: int, num_tokens: int) -> None:
        """This KV layer of the prompt's first num_tokens tokens is in its blocks."""
        with self._lock:
            for group in self._groups:
                if layer in group.source.layers:
                    index = layer - group.source.layers.start
                    group.advance(range(index, index + 1), num_tokens, self._target)
            self._finish_if_done(self._target)

    def all_computed(self, num_tokens: int) -> None:
        """Every layer's is."""
        with self._lock:
            for group in self._groups:
                group.advance(range(len(group.source.layers)), num_tokens, self._target)
            self._finish_if_done(self._target)

    def _finish_if_done(self, target: PushTarget | None) -> None:
        if target is None or self._finished:
            return
        num_blocks = self.num_blocks_of(target.block_size)
        if all(group.num_pushed >= num_blocks for group in self._groups):
            self._finished = True
            target.finish()


class _GroupProgress:
    """One group's part. Layers are numbered within it."""

    def __init__(self, source: SourceGroup, block_size: int, num_tokens: int, num_cached_tokens: int) -> None:
        self.source = source
        self._block_size = block_size
        self._num_tokens = num_tokens
        self._block_ids = list(source.block_ids)
        self._num_computed = [num_cached_tokens] * len(source.layers)  # tokens
        self._num_pushed: list[int] = []  # the receiver's blocks from the prompt's first on, once there is a target
        self._to = TargetGroup(0, 0)

    @property
    def num_pushed(self) -> int:
        """Blocks of the receiver that every layer has pushed."""
        return min(self._num_pushed)

    def start(self, target: PushTarget, to: TargetGroup) -> None:
        """Pushes what is computed."""
        self._to = to
        self._num_pushed = [to.first_block] * len(self._num_computed)
        self._push(target, range(len(self._num_computed)))

    def advance(self, layers: range, num_tokens: int, target: PushTarget | None) -> None:
        """So many tokens of these layers are computed."""
        for layer in layers:
            self._num_computed[layer] = max(self._num_computed[layer], num_tokens)
        if target is not None:
            self._push(target, layers)

    def _push(self, target: PushTarget, layers: range) -> None:
        """Neighbouring layers of which the same blocks are ready go together."""
        spans = [(self._num_pushed[layer], self._num_ready(target, layer)) for layer in layers]
        first = layers.start
        for (start, stop), alike in itertools.groupby(spans):
            following = first + len(list(alike))
            if start < stop:
                self._push_span(target, range(first, following), start, stop)
                self._num_pushed[first:following] = [stop] * (following - first)
            first = following

    def _num_ready(self, target: PushTarget, layer: int) -> int:
        """Blocks that will not change any more. The last one may stay partial."""
        num_computed = self._num_computed[layer]
        if num_computed >= self._num_tokens:
            return -(-self._num_tokens // target.block_size)
        return num_computed // target.block_size

    def _push_span(self, target: PushTarget, layers: range, start: int, stop: int) -> None:
        """In pieces as large as they may be. What is read for one is not much more, however large our blocks are."""
        most = self._to.max_block_layers
        num_blocks = min(stop - start, most)
        num_read = max(num_blocks, -(-self._block_size // target.block_size))
        num_layers = max(1, most // num_read)
        for layer in range(layers.start, layers.stop, num_layers):
            count = min(num_layers, layers.stop - layer)
            for first in range(start, stop, num_blocks):
                target.push(self._piece(target, layer, count, first, min(first + num_blocks, stop)))

    def _piece(self, target: PushTarget, layer: int, num_layers: int, start: int, stop: int) -> Piece:
        first_token = start * target.block_size
        end_token = min(stop * target.block_size, self._num_tokens)
        ours = slice(first_token // self._block_size, -(-end_token // self._block_size))
        return Piece(
            layer=self.source.layers.start + layer,
            first_index=start - self._to.first_block,
            num_blocks=stop - start,
            block_ids=self._block_ids[ours],
            skip_tokens=first_token % self._block_size,
            num_layers=num_layers,
        )
