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

    def cut(self, first: int) -> list[BlockId]:
        """Takes the blocks before number `first`, and returns them."""
        count = max(0, first - self.first)
        passed = self.block_ids[:count]
        del self.block_ids[:count]
        self.first += len(passed)
        return passed


class Phase(enum.Enum):
    """The phase of a request."""

    COMPILING = "waiting for its grammar"  # its constraint is being compiled; holds no blocks
    WAITING = "waiting"  # in the queue; holds no blocks
    PARKED = "parked"  # waits until another request has computed their common prefix; holds no blocks
    RESTORING = "restoring"  # waits until its prefix is restored from host memory; holds no blocks
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
    caching: bool = True  # its blocks may be stored and found
    num_cacheable_tokens: int = sys.maxsize  # from the front; blocks behind them are never found
    block_ids: list[BlockId] = field(default_factory=list)
    partial: list[WindowBlocks] = field(default_factory=list)  # its blocks in other groups than the first
    leased: list[BlockId] = field(default_factory=list)  # of all groups: these follow its blocks once they are settled
    block_hashes: list[BlockHash] = field(default_factory=list)  # of the full blocks hashed so far
    num_stored_blocks: int = 0  # blocks, from the front, that are stored
    row: int = NO_ROW
    last_step: int = 0  # the last step that computed it; set by the batch while it has a row
    num_remote_tokens: int = 0  # tokens of the remote prefill
    receiver_block_size: int = 0  # of the worker that gets the KV of a prefill_only request; 0: none does
    min_free: int = 0  # admission is not tried again with fewer free blocks
    started: float | None = None
    first_token: float | None = None
    grammar: GrammarMatch | None = None  # of a request with a constraint; read only while it is ready
    num_cached_tokens: int = 0
    num_transferred_tokens: int = 0
    num_preemptions: int = 0
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
