"""The real engine, which can also take many equal decode steps at once.

A coast is a run of steps in which every running request decodes one token and none is admitted, preempted or finished,
so that the scheduler has nothing to decide. Blocks are allocated and stored in the same order as in single steps.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from heapq import heapify, heapreplace
from itertools import accumulate, repeat
from operator import sub

import numpy as np

from baton.services.simulate.cluster.device import DeviceModel
from baton.services.simulate.cluster.executor import VirtualExecutor
from baton.worker.core import BlockHash, Int32, Int64, Request
from baton.worker.engine.adapters.pool import AdapterPool
from baton.worker.engine.engine import Engine
from baton.worker.kv.cache_events import RemovedEvent, StoredEvent
from baton.worker.requests.outputs import LoadSnapshot, StepOutputs
from baton.worker.requests.state import RequestState
from baton.worker.scheduling.settings import EngineSettings

_MAX_STEPS = 512

CacheEvent = StoredEvent | RemovedEvent
# What a step does to one row's blocks: the step's number in the coast, 0 to start a block and 1 to store a full one;
# new blocks go by rank and full ones by row, as in single steps; and the row's place in the coast.
_Move = tuple[int, int, tuple[int, float, int] | int, int]


class Coast:
    """Steps that need no decision: times[i] is when step i starts, the last is when the last one ends."""

    __slots__ = ("computed", "done", "last_step", "moves", "num_decodes", "rows", "states", "times")

    def __init__(self, rows: Int64, states: list[RequestState], computed: list[int], times: list[float]) -> None:
        self.rows = rows
        self.states = states
        self.computed = computed  # each request's tokens before the first step; the batch is updated at the end
        self.num_decodes = len(rows)
        self.times = times
        self.done = 0  # steps taken
        self.last_step = 0  # the number of the last one
        self.moves: list[_Move] | None = None  # a heap of each row's next ones; None: not looked at yet

    @property
    def num_steps(self) -> int:
        return len(self.times) - 1

    @property
    def now(self) -> float:
        """Returns when the steps taken so far end."""
        return self.times[self.done]

    @property
    def end(self) -> float:
        """Returns when the last step ends."""
        return self.times[-1]

    def boundary(self, time: float) -> float:
        """Returns the first end of a step at or after `time`, or the last end."""
        return self.times[min(bisect_left(self.times, time), len(self.times) - 1)]

    def boundary_after(self, time: float, seconds: float) -> float | None:
        """Returns the first end of a step at least `seconds` after `time`, or None."""
        times = self.times
        index = bisect_left(times, time + seconds)
        while index < len(times) and times[index] - time < seconds:
            index += 1  # rounded away
        return times[index] if index < len(times) else None


class VirtualEngine(Engine):
    """An Engine on a virtual executor."""

    def __init__(
        self,
        executor: VirtualExecutor,
        device: DeviceModel,
        settings: EngineSettings,
        epoch: int,
        clock: Callable[[], float],
        on_events: Callable[[float, list[CacheEvent]], None],
        adapters: AdapterPool[RequestState] | None = None,
    ) -> None:
        super().__init__(executor, settings, epoch, clock, adapters=adapters)
        self._device = device
        self._block_size = executor.kv_spec.block_size
        self._on_events = on_events  # called with what a coast's step did to the cache, and when
        self._known_hashes: dict[str, list[BlockHash]] = {}  # by request id, until it is submitted
        self._coast: Coast | None = None
        # The last call tried to admit, and its step admitted, preempted and finished no request.
        self._is_settled = False

    def know_hashes(self, request_id: str, block_hashes: list[BlockHash]) -> None:
        """Takes the hashes of a prompt's full blocks, computed before: `submit` would compute the same."""
        self._known_hashes[request_id] = block_hashes

    def _new_state(self, request: Request) -> RequestState:
        state = super()._new_state(request)
        if self._settings.prefix_caching:
            state.block_hashes = self._known_hashes.pop(request.request_id, [])
        return state

    def step(self, wait: bool = True) -> StepOutputs:
        """Takes one step in the real engine."""
        num_preemptions, was_scheduled = self._counters.num_preemptions, bool(self._in_flight)
        outputs = super().step(wait)
        self._is_settled = (
            not was_scheduled
            and outputs.num_decodes > 0
            and outputs.num_prefill_tokens == 0
            and not outputs.finishes
            and not outputs.failures
            and self._counters.num_preemptions == num_preemptions
        )
        return outputs

    def load(self) -> LoadSnapshot:
        load, coast = super().load(), self._coast
        if coast is None:
            return load
        return load._replace(num_context_tokens=load.num_context_tokens + coast.done * coast.num_decodes)

    def plan_coast(self, now: float, changes: bool = True) -> Coast | None:
        """Returns the coming steps that need no decision unless a message arrives, or None if the next one does.

        Without `changes`, also stops before a step that starts or fills a block.
        """
        scheduler = self._scheduler
        batch, pool = scheduler.batch, scheduler.pool
        if batch.max_step_tokens > 1:  # chance decides how many tokens each request gets
            return None
        if batch.prefilling or not len(batch) or self._in_flight or self._requests.outputs or scheduler.prefill_wanted:
            return None
        if scheduler.storing or (scheduler.queues.num_queued and not self._is_settled):
            return None
        rows = batch.decode_rows()
        if len(rows) != len(batch):
            return None
        states, computed, size = batch.states_at(rows), batch.num_computed[rows].tolist(), self._block_size
        num_steps = min([state.limit - tokens for state, tokens in zip(states, computed, strict=True)]) - 2
        num_steps = min(num_steps, _MAX_STEPS)
        if not changes or scheduler.has_states:  # blocks of states go by the scheduler's rules
            spare = (batch.capacity[rows] - batch.num_computed[rows]).min()
            num_steps = min(num_steps, int(spare), min([size - 1 - tokens % size for tokens in computed]))
        if len(rows) * (num_steps // size + 2) > pool.num_free:
            num_steps = self._fitting(num_steps, batch.capacity[rows] - batch.num_computed[rows])
        if num_steps < 1:
            return None
        coast = self._coast = Coast(rows, states, computed, self._times(len(rows), now, num_steps, sum(computed)))
        return coast

    def _fitting(self, num_steps: int, spare: Int32) -> int:
        """Returns as many steps as there are blocks for, or half as many, or a quarter..."""
        pool = self._scheduler.pool
        while num_steps > 0 and self._num_blocks_for(spare, num_steps) > pool.num_free:
            num_steps //= 2
        return num_steps

    def take_steps(self, coast: Coast, until: float) -> None:
        """Takes the coast's steps that start before `until`. Reports what each did to the cache."""
        target = min(bisect_left(coast.times, until), coast.num_steps)
        if coast.done < target:
            self._take(coast, target - coast.done)

    def next_change(self, coast: Coast) -> float:
        """Returns when the first step starts that is not taken because it starts or fills a block."""
        if coast.moves is None:
            coast.moves = self._first_moves(coast)
        return coast.times[min(coast.moves[0][0], len(coast.times) - 1)]

    def end_coast(self, coast: Coast) -> None:
        """Gives the requests the tokens of the steps taken. Before that only those of full blocks have theirs."""
        self._coast = None
        if not coast.done:
            return
        batch = self._scheduler.batch
        batch.num_computed[coast.rows] += coast.done
        batch.last_step[coast.rows] = coast.last_step
        for state, computed in zip(coast.states, coast.computed, strict=True):
            self._give_tokens(state, computed + coast.done)

    def _num_blocks_for(self, spare: Int32, num_steps: int) -> int:
        return int((np.maximum(num_steps - spare + self._block_size - 1, 0) // self._block_size).sum())

    def _times(self, count: int, now: float, num_steps: int, num_context: int) -> list[float]:
        """Returns when each step starts, and when the last one ends."""
        device = self._device
        # In the order of device.decode_seconds and of the executor, for equal rounding.
        fixed, slope = device.base + device.per_decode_request * count, device.per_context_token
        context = np.arange(num_context, num_context + count * num_steps, count)
        times = np.empty(num_steps + 1)
        times[0] = now
        np.add(fixed, slope * context, out=times[1:])
        ends: list[float] = times.cumsum().tolist()
        return ends

    def _take(self, coast: Coast, num_steps: int) -> None:
        scheduler, counters = self._scheduler, self._counters
        done = coast.done
        self._move_blocks(coast, done + num_steps)
        coast.last_step = scheduler.skip_steps(num_steps)
        taken = coast.times[done : done + num_steps + 1]
        seconds = list(map(sub, taken[1:], taken))
        self._rates.observe_decodes(seconds)
        counters.step_seconds = deque(accumulate(seconds, initial=counters.step_seconds), 1)[0]  # rounded as one by one
        counters.num_steps += num_steps
        counters.step_tokens.observe(coast.num_decodes, num_steps)
        counters.num_output_tokens += coast.num_decodes * num_steps
        coast.done += num_steps
        self._last_collect = coast.now

    def _first_moves(self, coast: Coast) -> list[_Move]:
        """Returns each row's next new block and next full one, before the coast's first step."""
        size, capacities = self._block_size, self._scheduler.batch.capacity[coast.rows].tolist()
        moves: list[_Move] = []
        for index, (state, computed) in enumerate(zip(coast.states, coast.computed, strict=True)):
            moves.append((capacities[index] - computed, 0, state.rank, index))
            moves.append((size - 1 - computed % size, 1, index, index))
        heapify(moves)
        return moves

    def _move_blocks(self, coast: Coast, until: int) -> None:
        """Allocates and stores what the steps before step `until` would: by step, new blocks first, then full ones."""
        if coast.moves is None:
            coast.moves = self._first_moves(coast)
        moves = coast.moves
        if moves[0][0] >= until:
            return
        scheduler, size = self._scheduler, self._block_size
        before = moves[0][:2]
        while (move := moves[0])[0] < until:
            step, is_full, order, index = move
            if move[:2] != before:
                # Evictions as the step begins, what it stored as it ends.
                if before[1] or scheduler.pool.has_evicted:
                    self._publish_events(coast.times[sum(before)])
                before = move[:2]
            state = coast.states[index]
            if is_full:
                num_computed = coast.computed[index] + step + 1
                self._give_tokens(state, num_computed)
                scheduler.store(state, num_computed)
            else:
                block_ids = scheduler.pool.allocate(1)
                assert block_ids is not None, "a coast ends before memory does"
                state.block_ids += block_ids
                scheduler.batch.capacity[state.row] += size
            heapreplace(moves, (step + size, is_full, order, index))
        self._publish_events(coast.times[sum(before)])

    def _give_tokens(self, state: RequestState, num_computed: int) -> None:
        """Counts the token that a decoding request knows beyond the computed ones."""
        request = state.request
        missing = num_computed + 1 - len(request.token_ids)
        if missing > 0:
            request.token_ids.extend(repeat(request.sampling.seed, missing))

    def _publish_events(self, time: float) -> None:
        events = self.take_events()
        if events:
            self._on_events(time, events)
