"""The blocks of one prompt that are computed, layer by layer, and those that were pushed.

Counts in tokens at the sender and in blocks of the receiver's size. A receiver's block is pushed when all its tokens
are computed, in whichever of the sender's blocks they are.

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

_UNKNOWN = BlockId(-1)


class TargetGroup(NamedTuple):
    """The target of one group's pieces."""

    first_block: int  # of the prompt, in the receiver's blocks; the receiver has the earlier ones
    max_block_layers: int  # of one piece: the largest product of blocks and layers


@dataclass(frozen=True, slots=True)
class PushTarget:
    """The target of the pieces. Any thread may call `push` and `finish`, which do not wait."""

    block_size: int  # of the receiver, in tokens
    groups: Sequence[TargetGroup]
    push: Callable[[Piece], None]
    finish: Callable[[], None]


class SourceGroup(NamedTuple):
    """The prompt's blocks in one group."""

    layers: range  # KV layers
    block_ids: Sequence[BlockId]
    first: int = 0  # the first one's number in the prompt
    has_states: bool = False  # the blocks are the pages of one state, that at the end of block `first`


class PushProgress:
    """Pushes every block once. The executor's thread reports computed layers, the engine's thread sets the target."""

    def __init__(self, groups: Sequence[SourceGroup], block_size: int, num_tokens: int, num_cached_tokens: int) -> None:
        self._groups = [
            (_StateProgress if group.has_states else _GroupProgress)(group, block_size, num_tokens, num_cached_tokens)
            for group in groups
        ]
        self.num_tokens = num_tokens
        self._target: PushTarget | None = None
        self._finished = False
        self._lock = threading.Lock()

    @property
    def num_blocks(self) -> int:
        """Blocks of the whole prompt, of the sender's size."""
        return len(self._groups[0].source.block_ids)

    def num_blocks_of(self, block_size: int) -> int:
        """Returns the blocks of the whole prompt, of another size."""
        return -(-self.num_tokens // block_size)

    def add_blocks(self, group: int, first: int, block_ids: Sequence[BlockId]) -> None:
        """Records more blocks of a group, before anything is computed in them."""
        with self._lock:
            self._groups[group].add_blocks(first, block_ids)

    def start(self, target: PushTarget) -> None:
        """Sets the target. Pushes what is computed, now and later."""
        with self._lock:
            self._target = target
            for group, to in zip(self._groups, target.groups, strict=True):
                group.start(target, to)
            self._finish_if_done(target)

    def layer_computed(self, layer: int, num_tokens: int) -> None:
        """Records that this KV layer of the first `num_tokens` tokens is computed."""
        with self._lock:
            for group in self._groups:
                if layer in group.source.layers:
                    index = layer - group.source.layers.start
                    group.advance(range(index, index + 1), num_tokens, self._target)
            self._finish_if_done(self._target)

    def all_computed(self, num_tokens: int) -> None:
        """Records that every layer of the first `num_tokens` tokens is computed."""
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
    """The progress of one group. Layers are numbered within it."""

    def __init__(self, source: SourceGroup, block_size: int, num_tokens: int, num_cached_tokens: int) -> None:
        self.source = source
        self._block_size = block_size
        self._num_tokens = num_tokens
        self._block_ids = [_UNKNOWN] * -(-num_tokens // block_size)
        self.add_blocks(source.first, source.block_ids)
        self._num_computed = [num_cached_tokens] * len(source.layers)  # tokens, by layer
        self._num_pushed: list[int] = []  # by layer, in the receiver's blocks; empty without a target
        self._to = TargetGroup(0, 0)

    @property
    def num_pushed(self) -> int:
        """Blocks of the receiver that every layer has pushed."""
        return min(self._num_pushed)

    def add_blocks(self, first: int, block_ids: Sequence[BlockId]) -> None:
        """Records blocks from number `first` on."""
        self._block_ids[first : first + len(block_ids)] = block_ids

    def start(self, target: PushTarget, to: TargetGroup) -> None:
        """Sets the target and pushes what is computed."""
        self._to = to
        self._num_pushed = [to.first_block] * len(self._num_computed)
        self._push(target, range(len(self._num_computed)))

    def advance(self, layers: range, num_tokens: int, target: PushTarget | None) -> None:
        """Records that `num_tokens` tokens of these layers are computed, and pushes."""
        for layer in layers:
            self._num_computed[layer] = max(self._num_computed[layer], num_tokens)
        if target is not None:
            self._push(target, layers)

    def _push(self, target: PushTarget, layers: range) -> None:
        """Pushes the ready blocks. Neighbouring layers with the same ready blocks share pieces."""
        spans = [(self._num_pushed[layer], self._num_ready(target, layer)) for layer in layers]
        first = layers.start
        for (start, stop), alike in itertools.groupby(spans):
            following = first + len(list(alike))
            if start < stop:
                self._push_span(target, range(first, following), start, stop)
                self._num_pushed[first:following] = [stop] * (following - first)
            first = following

    def _num_ready(self, target: PushTarget, layer: int) -> int:
        """Returns the blocks that will not change any more. The last block may stay partial."""
        num_computed = self._num_computed[layer]
        if num_computed >= self._num_tokens:
            return -(-self._num_tokens // target.block_size)
        return num_computed // target.block_size

    def _push_span(self, target: PushTarget, layers: range, start: int, stop: int) -> None:
        """Pushes in pieces of the largest allowed size, which limits reads of the sender's larger blocks too."""
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
        block_ids = self._block_ids[ours]
        assert _UNKNOWN not in block_ids, "blocks that the receiver gets are held until they are pushed"
        return Piece(
            layer=self.source.layers.start + layer,
            first_index=start - self._to.first_block,
            num_blocks=stop - start,
            block_ids=block_ids,
            skip_tokens=first_token % self._block_size,
            num_layers=num_layers,
        )


class _StateProgress(_GroupProgress):
    """The progress of a group of states. The one at the prompt's end is pushed, each layer when its last chunk is."""

    def add_blocks(self, first: int, block_ids: Sequence[BlockId]) -> None:
        """Records the pages of the state at the end of block `first`, which the next chunk writes."""
        self._last, self._pages = first, block_ids

    def _push_span(self, target: PushTarget, layers: range, start: int, stop: int) -> None:
        """Pushes the state in pieces of the largest allowed size."""
        assert self._last == (self._num_tokens - 1) // self._block_size, "the state is that of the prompt's last token"
        assert stop - start == 1, "the receiver gets one state"
        most = self._to.max_block_layers
        for layer in range(layers.start, layers.stop, most):
            target.push(
                Piece(
                    layer=self.source.layers.start + layer,
                    first_index=0,
                    num_blocks=1,
                    block_ids=self._pages,
                    num_layers=min(most, layers.stop - layer),
                )
            )
