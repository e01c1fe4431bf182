"""The running requests as columns, one row each, so that a step costs numpy calls instead of a loop over requests."""

from __future__ import annotations

import heapq
from bisect import insort
from operator import attrgetter
from typing import cast

import numpy as np

from baton.worker.core import Int32, Int64, Row
from baton.worker.requests.state import NO_ROW, RequestState

_RANK = attrgetter("rank")


class Batch:
    """Rows of running requests. The columns of a free row have no meaning."""

    def __init__(
        self, num_rows: int, max_step_tokens: int = 1, max_masked_tokens: int = 1, decode_span: int = 0
    ) -> None:
        """`decode_span`: the tokens of a decode in a step end with such a span of positions at the latest; 0: they may
        cross it."""
        self.num_rows = num_rows
        self.max_step_tokens = max_step_tokens  # of one decoding row
        self._decode_span = decode_span
        self._max_masked_tokens = max_masked_tokens  # of one that samples under a mask
        self.states: list[RequestState | None] = [None] * num_rows
        # Tokens, counted when they are scheduled: an upper bound while a step is in flight.
        self.num_computed = np.zeros(num_rows, np.int32)
        self.capacity = np.zeros(num_rows, np.int32)  # tokens that fit in the row's blocks
        self.max_computed = np.zeros(num_rows, np.int32)  # tokens; the KV of a request's last one is never needed
        self.last_step = np.zeros(num_rows, np.int64)
        self.constrained = np.zeros(num_rows, np.bool_)  # rows that sample under a mask
        self._decoding = np.zeros(num_rows, np.bool_)
        self.num_constrained = 0
        self._held = np.zeros(num_rows, np.bool_)
        self._num_held = 0
        self._followed = np.zeros(num_rows, np.bool_)  # of the held rows
        self._prefilling: list[RequestState] = []  # by rank
        self._free = list(range(num_rows))  # a heap: low rows first
        self._freed: list[Row] = []  # since take_freed
        self._decode_rows: Int64 | None = None  # None: stale

    def __len__(self) -> int:
        return self.num_rows - len(self._free)

    @property
    def num_free_rows(self) -> int:
        return len(self._free)

    @property
    def prefilling(self) -> list[RequestState]:
        """The requests with known tokens that are not computed yet, by rank."""
        return self._prefilling

    @property
    def num_decoding(self) -> int:
        return len(self) - len(self._prefilling)

    @property
    def num_held(self) -> int:
        """Rows that wait for the tokens that may follow."""
        return self._num_held

    def running(self) -> list[RequestState]:
        """Returns all requests that have a row."""
        return [state for state in self.states if state is not None]

    def add(self, state: RequestState, num_computed: int, capacity: int) -> Row:
        """Gives a request the lowest free row. It prefills until start_decoding."""
        row = heapq.heappop(self._free)
        self.states[row] = state
        self.num_computed[row] = num_computed
        self.capacity[row] = capacity
        self.max_computed[row] = state.limit - 1
        self.last_step[row] = state.last_step
        self.constrained[row] = state.grammar is not None
        self.num_constrained += state.grammar is not None
        state.row = row
        insort(self._prefilling, state, key=_RANK)
        return Row(row)

    def start_decoding(self, state: RequestState) -> None:
        """Makes the request decode from the next step on."""
        self._prefilling.remove(state)
        self._decoding[state.row] = True
        self._decode_rows = None

    def hold(self, rows: Int64) -> None:
        """Holds rows: they compute nothing until they are released."""
        self._held[rows] = True
        self._num_held = int(np.count_nonzero(self._held))

    def follow(self, rows: Int64, followed: bool) -> None:
        """Sets whether a step may compute these held rows: its masks are set once their last tokens are there."""
        self._followed[rows] = followed

    def follows(self, rows: Int64) -> bool:
        """Returns whether a step with these rows must be launched without its masks."""
        return bool(self._followed[rows].any())

    def release(self, row: int) -> None:
        """Ends a row's hold. Idempotent."""
        if self._held[row]:
            self._held[row] = False
            self._num_held -= 1
        self._followed[row] = False

    def remove(self, state: RequestState) -> Row:
        """Frees the request's row. The request keeps last_step."""
        row = Row(state.row)
        state.last_step = int(self.last_step[row])
        state.row = NO_ROW
        self.states[row] = None
        self.num_constrained -= bool(self.constrained[row])
        self.constrained[row] = False
        self.release(row)
        if self._decoding[row]:
            self._decoding[row] = False
            self._decode_rows = None
        else:
            self._prefilling.remove(state)
        heapq.heappush(self._free, row)
        self._freed.append(row)
        return row

    def take_freed(self) -> list[Row]:
        """Returns the rows freed since the last call."""
        freed, self._freed = self._freed, []
        return freed

    @property
    def num_context_tokens(self) -> int:
        """The computed tokens of all rows."""
        prefilling = sum([int(self.num_computed[state.row]) for state in self._prefilling])
        return prefilling + int(self.num_computed[self._all_decode_rows()].sum())

    def decode_rows(self) -> Int64:
        """Returns rows that can compute one more token, with held ones only if followed, within their limits."""
        rows = self._all_decode_rows()
        more = self.num_computed[rows] < self.max_computed[rows]
        if self._num_held:
            more &= ~self._held[rows] | self._followed[rows]
        return rows if np.count_nonzero(more) == len(more) else rows[more]

    def short_rows(self, rows: Int64) -> Int64:
        """Returns the decoding rows without a block for all tokens that they may compute in a step."""
        computed, capacity = self.num_computed[rows], self.capacity[rows]
        if self.max_step_tokens == 1 or self._decode_span:
            return rows[computed >= capacity]
        wanted = np.minimum(computed + self.max_step_tokens, self.max_computed[rows])
        return rows[wanted > capacity]

    def has_block(self, row: int) -> bool:
        """Returns whether the row can compute at least one more token in its blocks."""
        return bool(self.num_computed[row] < self.capacity[row])

    def step_tokens(self, rows: Int64, spare: int) -> Int32:
        """Returns the most tokens that each decoding row may compute in a step: one, and a part of `spare`.

        A row that samples under a mask computes one, unless the executor follows masks behind guesses.
        """
        tokens = np.empty(len(rows), np.int32)
        tokens.fill(1)
        if self.max_step_tokens == 1:
            return tokens
        most = min(self.max_step_tokens, 1 + spare // max(1, len(rows)))
        if most <= 1:
            return tokens
        ends, computed = np.minimum(self.max_computed[rows], self.capacity[rows]), self.num_computed[rows]
        if self._decode_span:
            ends = np.minimum(ends, (computed // self._decode_span + 1) * self._decode_span)
        more = np.minimum(ends - computed, most)
        if not self.num_constrained:
            return more
        return np.where(self.constrained[rows], np.minimum(more, self._max_masked_tokens), more)

    def take_back(self, states: list[RequestState], rows: Int64, unused: Int32) -> None:
        """Subtracts scheduled tokens that a step did not compute, for these requests in these rows."""
        for index in unused.nonzero()[0].tolist():
            if states[index].row == rows[index]:
                self.num_computed[rows[index]] -= unused[index]

    def states_at(self, rows: Int64) -> list[RequestState]:
        """Returns the requests at these rows, none of which is free."""
        states = cast(list[RequestState], self.states)
        return list(map(states.__getitem__, rows.tolist()))

    def _all_decode_rows(self) -> Int64:
        if self._decode_rows is None:
            self._decode_rows = np.flatnonzero(self._decoding)
        return self._decode_rows
