"""The batch of what drafts with weights of its own, on the CPU: rows, blocks of a KV pool, and computed tokens.

Tokens are drawn with the noise that the verified ones will have, so that two models that agree on the distribution
agree on the token. Filters and penalties are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.worker.core import BlockId, Int32, Int64, SamplingParams, StepPlan
from baton.worker.executors.cpu.rows import Rows
from baton.worker.executors.cpu.steps import PagedSteps
from baton.worker.executors.host.draft_models import DraftMemory
from baton.worker.executors.host.kv_memory import KvMemory
from baton.worker.executors.kv_dtype import dtype_name
from baton.worker.layers.cpu.device import CpuDevice
from baton.worker.layers.cpu.kv import PagedKv
from baton.worker.layers.cpu.step import StepInputs
from baton.worker.layers.rope import cos_sin_tables
from baton.worker.models.config import ModelConfig
from baton.worker.models.kv_groups import kv_spec_of
from baton.worker.sampling.candidates import Draws
from baton.worker.sampling.draw import draw_tokens
from baton.worker.speculation.proposer import Ask

CATCH_UP_TOKENS = 512  # of all rows in a step; rows with more unknown ones get no drafts until they are computed
_FEW = 16  # tokens of a row that are computed as decodes are
_NOTHING = np.empty(0, np.int32)
_LOW_64 = 0xFFFFFFFFFFFFFFFF


class Guesser(Protocol):
    """Computes steps over the batch's KV."""

    def forward(self, plan: StepPlan, inputs: StepInputs) -> Tensor:
        """Returns the hidden states [num_tokens, hidden_size] of a step, and writes its KV."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits [num_rows, vocab_size] of rows that `forward` returned."""


class DraftBatch:
    """The rows of a drafting model. A row whose tokens do not fit into its context or the pool gets no drafts."""

    def __init__(
        self, config: ModelConfig, digest: bytes, dtype: torch.dtype, memory: DraftMemory, vocab_size: int
    ) -> None:
        """`vocab_size` of the model that verifies."""
        spec = kv_spec_of(config, digest, memory.block_size, dtype_name(dtype))
        self._longest = min(config.max_model_len, memory.max_model_len)
        self._memory = KvMemory(spec, memory.num_blocks, dtype)
        self._rows = Rows(memory.num_rows, self._longest, memory.block_size, memory.num_blocks)
        cache = [self._memory.tensor(layer) for layer in range(config.num_layers)]
        self._steps = PagedSteps(self._rows, config, spec, cache[0], dtype)
        kv = PagedKv(cache, dtype, spec.layer_groups)
        ropes = cos_sin_tables(config.ropes, config.rope_head_dim, self._longest)
        self.device = CpuDevice(kv, ropes, places=spec.layer_places)
        self._vocab_size = min(vocab_size, config.vocab_size)
        self._block_size = memory.block_size
        self._free = list(map(BlockId, range(memory.num_blocks)))
        self._blocks: dict[int, list[BlockId]] = {}  # by row
        self._num_computed = np.zeros(memory.num_rows, np.int64)  # tokens whose KV is there
        self._num_prompt_tokens = np.zeros(memory.num_rows, np.int64)
        self._temperatures = np.zeros(memory.num_rows, np.float32)
        self._seeds = np.zeros(memory.num_rows, np.uint64)

    def admit(self, row: int, num_prompt_tokens: int, sampling: SamplingParams) -> None:
        """Begins a row without KV."""
        self.release(row)
        self._rows.num_blocks[:, row] = 0
        self._num_prompt_tokens[row] = num_prompt_tokens
        self._temperatures[row] = sampling.temperature
        self._seeds[row] = sampling.seed & _LOW_64

    def release(self, row: int) -> None:
        """Frees a row's blocks."""
        self._free += self._blocks.pop(row, ())
        self._num_computed[row] = 0

    def rewind(self, row: int, num_tokens: int) -> None:
        """Has the KV behind a row's first tokens computed again."""
        self._num_computed[row] = min(self._num_computed[row], num_tokens)

    def sleep(self) -> int:
        """Frees the pages of all blocks, whose KV is computed again when it is needed. Returns their bytes."""
        self._num_computed[:] = 0
        return self._memory.free()

    def propose(self, asked: Sequence[Ask], guesser: Guesser) -> list[Int32 | Exception]:
        """Returns the drafts of each row, as Proposer does."""
        drafts: dict[int, list[int]] = {ask.row: [] for ask in asked}
        with torch.inference_mode():
            ready = self._catch_up([ask for ask in asked if self._take(ask)], guesser)
            place = 1
            while len(ready.rows):
                token_ids = self._draw(ready)
                for row, token_id in zip(ready.rows.tolist(), token_ids.tolist(), strict=True):
                    drafts[row].append(token_id)
                more = ready.most > place
                ready = self._follow(ready.rows[more], ready.most[more], token_ids[more], guesser)
                place += 1
        return [np.array(drafts[ask.row], np.int32) if drafts[ask.row] else _NOTHING for ask in asked]

    def _take(self, ask: Ask) -> bool:
        """Takes a row's known tokens, and blocks for them and its drafts. Returns whether they fit."""
        row, count = ask.row, len(ask.token_ids)
        if count + ask.most > self._longest:
            return False
        needed = -(-(count + ask.most) // self._block_size)
        held = self._blocks.setdefault(row, [])
        if needed - len(held) > len(self._free):
            return False
        more = [self._free.pop() for _ in range(needed - len(held))]
        self._rows.add_blocks(row, more)
        held += more
        # Earlier drafts that were wrong have left KV behind.
        computed = min(int(self._num_computed[row]), count - 1)  # the last one's hidden state is needed in any case
        wrong = np.flatnonzero(self._rows.token_ids[row, :computed] != ask.token_ids[:computed])
        self._num_computed[row] = int(wrong[0]) if len(wrong) else computed
        self._rows.token_ids[row, :count] = ask.token_ids
        self._rows.num_tokens[row] = count
        return True

    def _catch_up(self, asked: Sequence[Ask], guesser: Guesser) -> _Ready:
        """Computes the rows' known tokens, within a step's limit. Returns the rows that have all of them."""
        spare, counts = CATCH_UP_TOKENS, {}
        missing = {ask.row: len(ask.token_ids) - int(self._num_computed[ask.row]) for ask in asked}
        for row in sorted(missing, key=missing.__getitem__):
            counts[row] = min(missing[row], spare)
            spare -= counts[row]
        rows = [row for row in counts if counts[row]]
        few = [row for row in rows if counts[row] == missing[row] <= _FEW]
        ordered = [*few, *(row for row in rows if row not in few)]
        if not ordered:
            return _Ready.none()
        numbers = np.array([counts[row] for row in ordered], np.int32)
        logits_of = self._compute(np.array(ordered), numbers, len(few), guesser)
        done = np.array([counts[row] == missing[row] for row in ordered])
        most = {ask.row: ask.most for ask in asked}
        chosen = np.array(ordered)[done]
        return _Ready(chosen, np.array([most[row] for row in chosen.tolist()], np.int64), logits_of(done))

    def _follow(self, rows: Int64, most: Int64, token_ids: Int64, guesser: Guesser) -> _Ready:
        """Computes the drafts of these rows, which become known tokens until the next call."""
        if not len(rows):
            return _Ready.none()
        self._rows.append(rows, token_ids)
        logits_of = self._compute(rows, np.ones(len(rows), np.int32), len(rows), guesser)
        return _Ready(rows, most, logits_of(np.ones(len(rows), np.bool_)))

    def _compute(
        self, rows: Int64, counts: Int32, num_decodes: int, guesser: Guesser
    ) -> Callable[[NDArray[np.bool_]], Tensor]:
        """Computes the next tokens of these rows, first those of decodes. Returns what gives the logits of some."""
        computed = self._num_computed[rows]
        plan = StepPlan(
            0,
            rows=rows,
            num_scheduled_tokens=counts,
            num_computed_tokens=computed.astype(np.int32),
            samples=np.ones(len(rows), np.bool_),
            num_decodes=num_decodes,
        )
        hidden = guesser.forward(plan, self._steps.make(plan))
        self._num_computed[rows] = computed + counts
        last = np.cumsum(counts, dtype=np.int64) - 1

        def logits_of(chosen: NDArray[np.bool_]) -> Tensor:
            return guesser.logits(hidden.index_select(0, torch.from_numpy(last[chosen])))

        return logits_of

    def _draw(self, ready: _Ready) -> Int64:
        rows = ready.rows
        nothing = np.zeros(len(rows), np.int64)
        ones, zeros = np.ones(len(rows), np.float32), np.zeros(len(rows), np.float32)
        draws = Draws(self._temperatures[rows], nothing, ones, zeros, self._seeds[rows])
        positions = self._rows.num_tokens[rows] - self._num_prompt_tokens[rows]
        logits = ready.logits[:, : self._vocab_size].float().numpy()
        return draw_tokens(logits, draws, positions)


@dataclass(frozen=True, slots=True)
class _Ready:
    """Rows whose next token can be drawn."""

    rows: Int64
    most: Int64  # drafts that each gets
    logits: Tensor  # [len(rows), vocab_size]

    @classmethod
    def none(cls) -> _Ready:
        return cls(np.empty(0, np.int64), np.empty(0, np.int64), torch.empty(0, 0))
