"""Drafts by a smaller model with weights and KV of its own, on the device of the model that verifies.

Each draft is a step of the small model, and reads the one before it on the device: the host waits once for all of a
row's drafts. A token is drawn with the noise that the verified one will have, as on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from baton.rpc.errors import Unsupported
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
from baton.worker.executors.kv_dtype import dtype_name
from baton.worker.kv_spec import KvSpec
from baton.worker.layers.cuda.device import CudaDevice
from baton.worker.layers.cuda.latent_device import LatentDevice
from baton.worker.layers.rope import cos_sin_tables
from baton.worker.models.kv_groups import kv_spec_of
from baton.worker.models.model import make_model
from baton.worker.speculation.proposer import Ask
from baton.worker.speculation_settings import SpeculationSettings
from baton.worker.weights.loading import LoadedModel

CATCH_UP_TOKENS = 512  # of a row in a step; a row with more unknown ones gets no drafts until they are computed
_FEW = 4  # tokens of a row that are computed as decodes are
_NOTHING = np.empty(0, np.int32)


def check_method(settings: SpeculationSettings | None) -> None:
    """Raises Unsupported for a method that has no form on a GPU."""
    if settings is not None and settings.method in ("eagle3", "mtp"):
        raise Unsupported(
            f"speculative_config: method {settings.method!r} reads hidden states of steps, which executor=cuda does "
            "not keep; give draft_model, ngram, suffix or a plugin, or executor=cpu",
            field="speculative_config",
        )


def draft_kv_spec(loaded: LoadedModel, block_size: int, dtype: torch.dtype) -> KvSpec:
    """Returns the spec of a draft model's KV."""
    return kv_spec_of(loaded.config, loaded.digest, block_size, dtype_name(dtype))


@dataclass(frozen=True, slots=True)
class _Sequences:
    """Tokens that a step computes, those of a row one after the other."""

    rows: Int64
    computed: Int32
    last: Int64  # the last sequence of each row


class CudaDraftModel:
    """Implements Proposer. A row whose tokens do not fit into its context or the pool gets no drafts."""

    costly = True

    def __init__(
        self,
        loaded: LoadedModel,
        dtype: torch.dtype,
        memory: DraftMemory,
        config: WorkerConfig,
        vocab_size: int,
        device: torch.device,
        *,
        most: int,
    ) -> None:
        """`vocab_size` of the model that verifies; `most` drafts of a row at a time."""
        model, rows = loaded.config, memory.num_rows
        self._longest = min(model.max_model_len, memory.max_model_len)
        self._vocab_size, self._block_size, self._device = vocab_size, memory.block_size, device
        self._batch = DeviceBatch(rows, self._longest, memory.block_size, device)
        spec = draft_kv_spec(loaded, memory.block_size, dtype)
        own = replace(config, speculative_config="", batch_invariant=False, max_num_requests=rows)
        cache = allocate_kv(spec, dtype, memory.num_blocks, device)
        paged = make_paged(own, model, spec, cache, self._batch.block_tables, dtype, None)
        ops = device_of(own, paged, cos_sin_tables(model.ropes, model.rope_head_dim, self._longest), [])
        captured = config.cuda_graphs and model.capturable
        self._head = GenerateHead(self._batch, rows, model.vocab_size, dtype, device, captured=captured)
        decoder = make_model(model, loaded.weights, ops)
        self._stepper = Stepper(self._batch, decoder, paged, self._head, rows, memory.block_size, device)
        self._num_rows = rows
        self._free = list(map(BlockId, range(1, memory.num_blocks)))  # padding reads the first one
        self._blocks: dict[int, list[BlockId]] = {}  # by row
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

    def admit(self, init: RowInit) -> None:
        """Begins a row without KV."""
        self._release(int(init.row))
        self._inits[int(init.row)] = init

    def free(self, row: int, token_ids: Int32) -> None:
        """Frees a row's blocks."""
        self._release(row)

    def sleep(self) -> int:
        """Frees nothing: the weights and the KV of a draft model stay on the device. Returns 0."""
        return 0

    def close(self) -> None:
        """Does nothing: the memory of weights and KV ends with this object."""

    def propose(self, asked: Sequence[Ask]) -> list[Int32 | Exception]:
        with torch.inference_mode():
            taken = self._take([ask for ask in asked if self._fits(ask)])
            ready = [ask for ask in taken if self._catch_up(ask)]
            found = self._draft(ready)
        return [found.get(ask.row, _NOTHING) for ask in asked]

    def _fits(self, ask: Ask) -> bool:
        """Takes blocks for a row's known tokens and drafts. Returns whether there are enough."""
        count = len(ask.token_ids) + ask.most
        if count > self._longest:
            return False
        needed = -(-count // self._block_size) - len(self._blocks.get(ask.row, ()))
        return needed <= len(self._free)

    def _take(self, asked: list[Ask]) -> list[Ask]:
        """Gives the device the rows' new blocks and tokens. Returns the rows that it has."""
        plan, writes, taken = StepPlan(0), [], []
        for ask in asked:
            row, count = ask.row, len(ask.token_ids)
            held = self._blocks.setdefault(row, [])
            needed = max(0, -(-(count + ask.most) // self._block_size) - len(held))
            if needed > len(self._free):
                continue
            taken.append(ask)
            more = [self._free.pop() for _ in range(needed)]
            held += more
            if more:
                plan.new_blocks.append((Row(row), more))
            init = self._inits.pop(row, None)
            if init is not None:
                sampling = SamplingParams(temperature=init.sampling.temperature, seed=init.sampling.seed)
                plan.admitted.append(RowInit(Row(row), ask.token_ids.copy(), init.num_prompt_tokens, sampling))
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
        if count - computed > _FEW:
            chunk = min(count - 1 - computed, CATCH_UP_TOKENS)
            self._stepper.run(_chunk(ask.row, computed, chunk), self._head, None)
            self._num_computed[ask.row] = computed = computed + chunk
        return count - computed <= _FEW

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
        for count in {1, min(tokens, 2 * _FEW), min(tokens, 64), tokens}:
            self._stepper.run(_chunk(0, 0, count), self._head, None)

    def _release(self, row: int) -> None:
        self._free += self._blocks.pop(row, ())
        self._inits.pop(row, None)
        self._num_computed[row] = 0


def _chunk(row: int, computed: int, count: int) -> StepPlan:
    return StepPlan(
        0,
        rows=np.array([row], np.int64),
        num_scheduled_tokens=np.array([count], np.int32),
        num_computed_tokens=np.array([computed], np.int32),
        samples=np.zeros(1, np.bool_),
        num_decodes=0,
    )
