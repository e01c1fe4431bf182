"""The scheduling state of one request: its phase, its blocks, its progress. Decides nothing."""

from __future__ import annotations

import enum
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from baton.rpc.block_hash import HASH_BYTES, hash_packed_blocks, pack_tokens
from baton.worker.core import BlockHash, BlockId, Request, TokenIds

if TYPE_CHECKING:
    from baton.worker.sampling.grammar.matching.match import GrammarMatch

NO_ROW = -1
# (priority, arrival, order of submission): the smallest runs first, the largest is preempted
Rank: TypeAlias = tuple[int, float, int]
_HASHES = np.dtype(f"V{HASH_BYTES}")


class Line(NamedTuple):
    """A queue of requests of one priority and one tenant."""

    priority: int
    tenant: str


class GroupSpan(NamedTuple):
    """Consecutive blocks of a request's chain in one group."""

    first: int  # number of the first one
    block_ids: list[BlockId]


@dataclass(slots=True)
class WindowBlocks:
    """A request's blocks in a window group: consecutive ones of its chain."""

    group: int
    first: int  # number of the first one in the chain
    block_ids: list[BlockId]

    @property
    def stop(self) -> int:
        """The number after the last one."""
        return self.first + len(self.block_ids)

    @property
    def pages(self) -> list[BlockId]:
        """The memory of its blocks."""
        return self.block_ids

    def cut(self, first: int) -> list[tuple[int, BlockId]]:
        """Takes the blocks before number `first`, and returns them with their numbers."""
        count = max(0, first - self.first)
        passed = list(enumerate(self.block_ids[:count], self.first))
        del self.block_ids[:count]
        self.first += len(passed)
        return passed

    def write(self, start: int, stop: int, block_size: int) -> None:
        """Does nothing: a chunk writes the block of each token."""

    def named(self) -> list[GroupSpan]:
        """Returns the blocks as consecutive ones of the chain."""
        return [GroupSpan(self.first, list(self.block_ids))]

    def movable(self) -> GroupSpan:
        """Returns the blocks that another worker may get."""
        return GroupSpan(self.first, list(self.block_ids))

    def newest(self) -> GroupSpan:
        """Returns the last block."""
        return GroupSpan(self.stop - 1, self.block_ids[-1:])

    def findable(self, start: int, stop: int) -> list[tuple[int, BlockId]]:
        """Returns the held ones of blocks [start, stop), with their numbers."""
        first = max(start, self.first)
        return list(enumerate(self.block_ids[first - self.first : max(0, stop - self.first)], first))

    def placed(self) -> list[tuple[int, BlockId]]:
        """Returns its blocks with their numbers."""
        return list(enumerate(self.block_ids, self.first))


@dataclass(slots=True)
class StateBlocks:
    """A request's states in a group of states: the one that it reads next, and the one that it writes.

    A state is that at the end of the block whose number it has. While that block is computed, it is replaced in place.
    """

    group: int
    numbers: list[int]  # ascending
    states: list[list[BlockId]]  # the pages of each; then those of the next one, if it has no number yet
    left_early: int = -1  # a number, whose state is that of a token within the block: the next chunk passed its end

    @property
    def block_ids(self) -> list[BlockId]:
        """The first page of each state, by which the pool knows it."""
        return [pages[0] for pages in self.states]

    @property
    def pages(self) -> list[BlockId]:
        """The memory of its states."""
        return [page for pages in self.states for page in pages]

    @property
    def stop(self) -> int:
        """The number after the last one."""
        return self.numbers[-1] + 1 if self.numbers else 0

    @property
    def has_spare(self) -> bool:
        """Whether there is a state for the next number."""
        return len(self.states) > len(self.numbers)

    def cut(self, first: int) -> list[tuple[int, BlockId]]:
        """Takes the states before number `first`, and returns them with their numbers."""
        count = sum(number < first for number in self.numbers)
        passed = list(zip(self.numbers[:count], self.block_ids[:count], strict=True))
        del self.numbers[:count], self.states[:count]
        return passed

    def write(self, start: int, stop: int, block_size: int) -> None:
        """Numbers the state that a chunk [start, stop) writes."""
        number = (stop - 1) // block_size
        if number < self.stop:
            return
        if start % block_size:
            self.left_early = (start - 1) // block_size
        assert self.has_spare, f"no memory for the state at the end of block {number}"
        self.numbers.append(number)

    def named(self) -> list[GroupSpan]:
        """Returns the pages of each numbered state."""
        return [GroupSpan(number, list(pages)) for number, pages in zip(self.numbers, self.states, strict=False)]

    def movable(self) -> GroupSpan:
        """Returns the pages of the last numbered state, the only one that another worker may get; none before it."""
        return self.named()[-1] if self.numbers else GroupSpan(0, [])

    def newest(self) -> GroupSpan:
        """Returns the pages of the last state."""
        return GroupSpan(self.numbers[-1], list(self.states[-1]))

    def findable(self, start: int, stop: int) -> list[tuple[int, BlockId]]:
        """Returns the states at the ends of blocks [start, stop), with their numbers."""
        return [each for each in self.placed() if start <= each[0] < stop and each[0] != self.left_early]

    def placed(self) -> list[tuple[int, BlockId]]:
        """Returns its states with their numbers. One without a number comes last."""
        numbers = [*self.numbers, self.stop] if self.has_spare else self.numbers
        return list(zip(numbers, self.block_ids, strict=True))


PartialBlocks: TypeAlias = WindowBlocks | StateBlocks


class Phase(enum.Enum):
    """The phase of a request."""

    LOADING = "waiting for its adapter"  # which is not on the device yet; holds no blocks
    COMPILING = "waiting for its grammar"  # its constraint is being compiled; holds no blocks
    WAITING = "waiting"  # in the queue; holds no blocks
    PARKED = "parked"  # waits until another request has computed their common prefix; holds no blocks
    RESTORING = "restoring"  # waits until its prefix is restored from host memory, or read from disk; holds no blocks
    REMOTE = "remote"  # another worker prefills it; holds its cached prefix, and leases the rest once reserved
    READY = "ready"  # waits for a row after a remote prefill; holds all its blocks
    RUNNING = "running"  # has a row
    HOLDING = "holding"  # prefill_only, computed; holds its blocks until freed
    DONE = "done"  # ended; may still have an open lease


@dataclass(slots=True, eq=False)
class RequestState:
    """A request's scheduling state."""

    request: Request
    rank: Rank
    limit: int  # tokens, prompt and output, at which it ends
    stop_token_ids: frozenset[int]  # including those of end-of-sequence
    submitted: float
    phase: Phase = Phase.WAITING
    wants_remote: bool = False  # a remote prefill is still possible
    restored: bool = False  # its prefix was restored from host memory
    loaded: bool = False  # blocks of its prefix were read from disk
    caching: bool = True  # its blocks may be stored and found
    num_cacheable_tokens: int = sys.maxsize  # from the front; blocks behind them are never found
    block_ids: list[BlockId] = field(default_factory=list)
    partial: list[PartialBlocks] = field(default_factory=list)  # its blocks in other groups than the first
    leased: list[BlockId] = field(default_factory=list)  # of all groups: these follow its blocks once they are settled
    block_hashes: list[BlockHash] = field(default_factory=list)  # of the full blocks hashed so far
    snapshots: set[int] = field(default_factory=set)  # numbers of blocks at whose end its states are worth keeping
    num_stored_blocks: int = 0  # blocks, from the front, that are stored
    row: int = NO_ROW
    last_step: int = 0  # the last step that computed it; set by the batch while it has a row
    num_remote_tokens: int = 0  # tokens of the remote prefill
    receiver_block_size: int = 0  # of the worker that gets the KV of a prefill_only request; 0: none does
    min_free: int = 0  # admission is not tried again with fewer free blocks
    started: float | None = None
    first_token: float | None = None
    adapter_slot: int = -1  # of its adapter on the device, while it may run; -1: it has none
    grammar: GrammarMatch | None = None  # of a request with a constraint; read only while it is ready
    num_cached_tokens: int = 0
    num_transferred_tokens: int = 0
    num_preemptions: int = 0
    num_draft_tokens: int = 0  # guessed and verified
    num_accepted_tokens: int = 0  # of them
    line: Line = field(init=False)
    max_generated: int = field(init=False)  # tokens beyond its initial ones at which it ends

    def __post_init__(self) -> None:
        self.line = Line(self.rank[0], self.request.tenant)
        self.max_generated = self.limit - len(self.request.token_ids.given)

    @property
    def mask_pending(self) -> bool:
        """Whether the tokens that may follow are not known yet."""
        return self.grammar is not None and not self.grammar.ready

    @property
    def token_ids(self) -> TokenIds:
        """The prompt, and the output so far."""
        return self.request.token_ids

    @property
    def num_output_tokens(self) -> int:
        return len(self.request.token_ids) - self.request.num_prompt_tokens

    def lifetime_blocks(self, block_size: int) -> int:
        """Returns the most blocks that it can ever need. The last token's KV is never computed."""
        return num_blocks_for(max(self.limit - 1, len(self.request.token_ids)), block_size)

    def take_hashes(self, packed: bytes, block_size: int) -> None:
        """Sets the first block_hashes, which were computed before: 16 bytes a block."""
        most = min(len(self.token_ids), self.num_cacheable_tokens) // block_size
        self.block_hashes = split_hashes(packed[: most * HASH_BYTES])

    def hash_up_to(self, num_tokens: int, block_size: int) -> None:
        """Extends block_hashes over the full blocks of the first `num_tokens` tokens."""
        start, stop = len(self.block_hashes), min(num_tokens, self.num_cacheable_tokens) // block_size
        if stop <= start:
            return
        request = self.request
        parent = self.block_hashes[-1] if start else request.cache_namespace
        packed = _packed(request.token_ids, start * block_size, stop * block_size)
        self.block_hashes += split_hashes(hash_packed_blocks(parent, packed, block_size))


def _packed(token_ids: TokenIds, start: int, stop: int) -> bytes:
    """Returns tokens as little-endian 32-bit integers."""
    given, num_given = token_ids.given, len(token_ids.given)
    generated = token_ids.generated[max(0, start - num_given) : max(0, stop - num_given)]
    if start >= num_given:
        return pack_tokens(generated)
    return given[start:stop].astype("<i4", copy=False).tobytes() + pack_tokens(generated)


def split_hashes(packed: bytes) -> list[BlockHash]:
    """Splits hashes of 16 bytes each."""
    if len(packed) == HASH_BYTES:
        return [BlockHash(packed)]
    hashes: list[BlockHash] = np.frombuffer(packed, _HASHES).tolist()
    return hashes


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Returns the blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)
