"""Drafts by a small net with KV of its own, on the device of the model that verifies.

Each draft is a step of the net, and reads the one before it on the device: the host waits once for all of a
row's drafts. A token is drawn with the noise that the verified one will have, as on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from baton.worker.config import WorkerConfig
from baton.worker.core import BlockId, Int32, Int64, Row, RowInit, SamplingParams, StepPlan
from baton.worker.executors.cuda.inputs.batch import DeviceBatch
from baton.worker.executors.cuda.sampling.generate_head import GenerateHead
from baton.worker.executors.cuda.sampling.undrawn import Undrawn
from baton.worker.executors.cuda.startup.attention import device_of, make_paged
from baton.worker.executors.cuda.startup.memory import allocate_kv
from baton.worker.executors.cuda.steps.graphs import DecodeGraphs, graph_sizes
from baton.worker.executors.cuda.steps.stepper import Stepper
from baton.worker.executors.host.draft_models import DraftMemory
from baton.worker.kv_spec import KvSpec
from baton.worker.layers.cuda.device import CudaDevice
from baton.worker.layers.cuda.latent_device import LatentDevice
from baton.worker.layers.cuda.step import StepInputs
from baton.worker.layers.rope import cos_sin_tables
from baton.worker.models.config import ModelConfig
from baton.worker.models.model import Model
from baton.worker.speculation.proposer import Ask

CATCH_UP_TOKENS = 512  # of a row in a step; a row with more unknown ones gets no drafts until they are computed
_NOTHING = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class DraftNet:
    """What guesses: its shape, the spec of its KV, and how it is made on a device with that KV."""

    config: ModelConfig
    spec: KvSpec
    make: Callable[[CudaDevice | LatentDevice, DraftRows], Model[StepInputs]]


@dataclass(frozen=True, slots=True)
class DraftRows:
    """The rows of a draft net on the device."""

    block_table: Tensor  # [num_rows, max_blocks] int32
    block_size: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class _Sequences:
    """Tokens that a step computes, those of a row one after the other."""

    rows: Int64
    computed: Int32
    last: Int64  # the last sequence of each row


class DraftSteps:
    """Drafts of rows, by steps of a net. A row whose tokens do not fit into its context or the pool gets none."""

    def __init__(
        self,
        net: DraftNet,
        dtype: torch.dtype,
        memory: DraftMemory,
        config: WorkerConfig,
        device: torch.device,
        *,
        most: int,
        few: int,
    ) -> None:
        """`most` drafts of a row at a time; up to `few` unknown tokens of a row are computed as decodes are."""
        model, rows = net.config, memory.num_rows
        self._longest = min(model.max_model_len, memory.max_model_len)
        self._block_size, self._device, self._few = memory.block_size, device, few
        self._batch = DeviceBatch(rows, self._longest, memory.block_size, device)
        own = replace(config, speculative_config="", batch_invariant=False, max_num_requests=rows)
        cache = allocate_kv(net.spec, dtype, memory.num_blocks, device)
        paged = make_paged(own, model, net.spec, cache, self._batch.block_tables, dtype, None)
        ops = device_of(own, paged, cos_sin_tables(model.ropes, model.rope_head_dim, self._longest), [])
        captured = config.cuda_graphs and model.capturable
        self._head = GenerateHead(self._batch, rows, model.vocab_size, dtype, device, captured=captured)
        decoder = net.make(ops, DraftRows(self._batch.block_table, memory.block_size, memory.num_blocks))
        self._stepper = Stepper(self._batch, decoder, paged, self._head, rows, memory.block_size, device)
        self._num_rows = rows
        self._free = list(map(BlockId, range(1, memory.num_blocks)))  # padding reads the first one
        self._blocks: dict[int, list[BlockId]] = {}  # by row
        self._table = np.zeros((rows, self._batch.max_blocks), np.int64)  # the same
        self.room = np.zeros(rows, np.int64)  # tokens that each row has blocks for
        self._inits: dict[int, RowInit] = {}  # rows that the device does not have yet
        self._token_ids = np.zeros((rows, self._longest + 1), np.int32)  # that the KV was made of
        self._num_computed = np.zeros(rows, np.int64)
        self._graphs: DecodeGraphs | None = None
        pinned = torch.empty(most, rows, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._pinned = pinned
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.inference_mode():
            self._warm_up(ops)
            if captured:
                self._graphs = DecodeGraphs(graph_sizes(rows), device, self._stepper, lambda *_: None)

    def begin(self, init: RowInit) -> None:
        """Begins a row without KV."""
        self.release(int(init.row))
        self._inits[int(init.row)] = init

    def release(self, row: int) -> None:
        """Frees a row's blocks."""
        self._free += self._blocks.pop(row, ())
        self._inits.pop(row, None)
        self._num_computed[row] = self.room[row] = 0

    def reserve(self, row: int, count: int) -> bool:
        """Takes blocks for the first `count` tokens of a row. Returns whether there are enough."""
        if count > self._longest or self._missing(row, count) > len(self._free):
            return False
        plan, init = StepPlan(0), self._inits.pop(row, None)
        if init is not None:
            plan.admitted.append(_bare(init, _NOTHING))
        self._add_blocks(plan, row, count)
        if plan.admitted or plan.new_blocks:
            self._batch.apply(plan)
            self._head.take_rows(plan)
        return True

    def slots(self, rows: Int64, positions: Int64) -> Int64:
        """Returns where the pool has tokens, whose rows have blocks for them."""
        blocks = self._table[rows, positions // self._block_size]
        return blocks * self._block_size + positions % self._block_size

    def forget(self, rows: Int64, firsts: Int64) -> None:
        """Has the tokens of rows from these on computed again."""
        np.minimum.at(self._num_computed, rows, firsts)

    def drafts(self, asked: Sequence[Ask]) -> dict[int, Int32]:
        """Returns the drafts of those rows that have some."""
        with torch.inference_mode():
            taken = self._take([ask for ask in asked if self._fits(ask)])
            return self._draft([ask for ask in taken if self._catch_up(ask)])

    def _fits(self, ask: Ask) -> bool:
        """Returns whether there are blocks for a row's known tokens and drafts."""
        count = len(ask.token_ids) + ask.most
        return count <= self._longest and self._missing(ask.row, count) <= len(self._free)

    def _missing(self, row: int, count: int) -> int:
        """Returns the blocks that a row lacks for its first `count` tokens."""
        return max(0, -(-count // self._block_size) - len(self._blocks.get(row, ())))

    def _add_blocks(self, plan: StepPlan, row: int, count: int) -> None:
        held = self._blocks.setdefault(row, [])
        more = [self._free.pop() for _ in range(self._missing(row, count))]
        if more:
            self._table[row, len(held) : len(held) + len(more)] = more
            held += more
            self.room[row] = len(held) * self._block_size
            plan.new_blocks.append((Row(row), more))

    def _take(self, asked: list[Ask]) -> list[Ask]:
        """Gives the device the rows' new blocks and tokens. Returns the rows that it has."""
        plan, writes, taken = StepPlan(0), [], []
        for ask in asked:
            row, count = ask.row, len(ask.token_ids)
            if self._missing(row, count + ask.most) > len(self._free):
                continue
            taken.append(ask)
            self._add_blocks(plan, row, count + ask.most)
            init = self._inits.pop(row, None)
            if init is not None:
                plan.admitted.append(_bare(init, ask.token_ids.copy()))
                self._num_computed[row] = 0
            # Earlier drafts that were wrong have left KV behind.
            computed = min(int(self._num_computed[row]), count - 1)  # the last one's hidden state is always needed
            wrong = np.flatnonzero(self._token_ids[row, :computed] != ask.token_ids[:computed])
            first = int(wrong[0]) if len(wrong) else computed
            self._num_computed[row] = first
            self._token_ids[row, first:count] = ask.token_ids[first:]
            if init is None:
                writes.append((row, first, ask.token_ids[first:]))
        self._batch.apply(plan)
        self._head.take_rows(plan)
        if writes:
            counts = np.array([len(token_ids) for _, _, token_ids in writes], np.int64)
            rows = np.repeat(np.array([row for row, _, _ in writes], np.int64), counts)
            positions = np.concatenate([first + np.arange(len(token_ids)) for _, first, token_ids in writes])
            self._batch.write_tokens(rows, positions, np.concatenate([token_ids for _, _, token_ids in writes]))
        return taken

    def _catch_up(self, ask: Ask) -> bool:
        """Computes a chunk of a row with many unknown tokens. Returns whether few are left."""
        computed, count = int(self._num_computed[ask.row]), len(ask.token_ids)
        if count - computed > self._few:
            chunk = min(count - 1 - computed, CATCH_UP_TOKENS)
            self._stepper.run(_chunk(ask.row, computed, chunk), self._head, None)
            self._num_computed[ask.row] = computed = computed + chunk
        return count - computed <= self._few

    def _draft(self, asked: list[Ask]) -> dict[int, Int32]:
        """Queues a step for each draft. Returns the drafts of the rows."""
        asked = self._within(asked)
        if not asked:
            return {}
        asked = sorted(asked, key=lambda ask: -ask.most)  # rows that want fewer drop out at the end
        rows = np.array([ask.row for ask in asked], np.int64)
        known = np.array([len(ask.token_ids) for ask in asked], np.int64)
        wanted = np.array([ask.most for ask in asked], np.int64)
        step = self._known(rows, known)
        for place in range(int(wanted[0])):
            count = int(np.count_nonzero(wanted > place))
            if place:
                own = np.arange(count)
                step = _Sequences(rows[:count], (known[:count] + place - 1).astype(np.int32), own)
            tokens = self._step(step)
            if len(tokens) > count:
                tokens = tokens[self._batch.upload(step.last)]
            self._pinned[place, :count].copy_(tokens[:count], non_blocking=True)
        self._done.record()
        self._done.synchronize()
        drafts = self._pinned.numpy()
        found = {}
        for index, ask in enumerate(asked):
            own_drafts = drafts[: ask.most, index].copy()
            found[ask.row] = own_drafts
            # The last draft is the input of no step.
            end = int(known[index]) + ask.most - 1
            self._token_ids[ask.row, known[index] : end] = own_drafts[:-1]
            self._num_computed[ask.row] = end
        return found

    def _within(self, asked: list[Ask]) -> list[Ask]:
        """Returns the first rows whose unknown tokens fit into a step."""
        missing = [len(ask.token_ids) - int(self._num_computed[ask.row]) for ask in asked]
        total = np.cumsum(missing)
        return [ask for ask, end in zip(asked, total.tolist(), strict=True) if end <= self._num_rows]

    def _known(self, rows: Int64, known: Int64) -> _Sequences:
        """Returns the unknown tokens of rows, each a sequence."""
        counts = known - self._num_computed[rows]
        ends = np.cumsum(counts)
        computed = np.arange(int(ends[-1])) - np.repeat(ends - counts, counts) + np.repeat(known - counts, counts)
        return _Sequences(np.repeat(rows, counts), computed.astype(np.int32), ends - 1)

    def _step(self, step: _Sequences) -> Tensor:
        """Queues a step, which writes each sequence's token behind it. Returns the tokens."""
        if self._graphs is not None:
            return self._graphs.replay(step.rows, step.computed).tokens
        count = len(step.rows)
        plan = StepPlan(
            0,
            rows=step.rows,
            num_scheduled_tokens=np.ones(count, np.int32),
            num_computed_tokens=step.computed,
            samples=np.ones(count, np.bool_),
            num_decodes=count,
        )
        drawn: Undrawn = self._stepper.run(plan, self._head, None)
        return drawn.tokens

    def _warm_up(self, ops: CudaDevice | LatentDevice) -> None:
        """Compiles attention, and what chunks of prompts need. Their KV goes to the first block, which no row has."""
        ops.warm_up()
        tokens = min(self._longest - 1, CATCH_UP_TOKENS)
        for count in {1, min(tokens, 2 * self._few), min(tokens, 64), tokens}:
            self._stepper.run(_chunk(0, 0, count), self._head, None)


def _bare(init: RowInit, token_ids: Int32) -> RowInit:
    """Returns a row that draws with another one's noise, without its filters."""
    sampling = SamplingParams(temperature=init.sampling.temperature, seed=init.sampling.seed)
    return RowInit(init.row, token_ids, init.num_prompt_tokens, sampling)


def _chunk(row: int, computed: int, count: int) -> StepPlan:
    return StepPlan(
        0,
        rows=np.array([row], np.int64),
        num_scheduled_tokens=np.array([count], np.int32),
        num_computed_tokens=np.array([computed], np.int32),
        samples=np.zeros(1, np.bool_),
        num_decodes=0,
    )
