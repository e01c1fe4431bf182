"""Runs the same model on a CPU, and on a GPU in Triton's interpreter, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from baton.worker.config import WorkerConfig
from baton.worker.core import BlockId, Row, RowInit, SamplingParams, StepPlan
from baton.worker.executors.cpu.rows import Rows
from baton.worker.executors.cpu.step_inputs import Gathers, make_step_inputs, views_of
from baton.worker.executors.cuda.startup.attention import device_of, make_paged
from baton.worker.executors.cuda.steps.piecewise import Pieces
from baton.worker.layers.cpu.device import CpuDevice
from baton.worker.layers.cpu.kv import PagedKv
from baton.worker.layers.cuda.step import StepInputs
from baton.worker.layers.rope import cos_sin_tables
from baton.worker.models.config import ModelConfig
from baton.worker.models.kv_groups import kv_spec_of, window_spec_of
from baton.worker.models.model import Weights, make_model

BLOCK_SIZE = 16
BLOCKS_A_ROW = 2
MAX_LEN = BLOCK_SIZE * BLOCKS_A_ROW


class Chunk(NamedTuple):
    """The tokens of one row that a step computes."""

    row: int
    first: int
    last: int


# Two prompts, then a decode with the other prompt's next chunk, then the decode alone.
STEPS: list[tuple[int, list[Chunk]]] = [
    (0, [Chunk(0, 0, 9), Chunk(1, 0, 3)]),
    (1, [Chunk(0, 9, 10), Chunk(1, 3, 7)]),
    (1, [Chunk(0, 10, 11)]),
]


class Cpu:
    def __init__(self, config: ModelConfig, weights: Weights, tokens: Tensor) -> None:
        spec = kv_spec_of(config, bytes(16), BLOCK_SIZE, "float32")
        self.cache = torch.zeros(2, len(tokens) * BLOCKS_A_ROW + 1, *spec.block_shape(spec.groups[0]))
        tables = cos_sin_tables(config.ropes, config.rope_head_dim, MAX_LEN)
        self.decoder = make_model(config, weights, CpuDevice(PagedKv(self.cache.unbind()), tables))
        self._views = views_of(config.windows, [0] * config.num_layers)
        self._rows = Rows(len(tokens), MAX_LEN, BLOCK_SIZE, null_block=len(tokens) * BLOCKS_A_ROW)
        for row, token_ids in enumerate(tokens.numpy().astype(np.int32)):
            self._rows.admit(RowInit(Row(row), token_ids, MAX_LEN, SamplingParams()))
            first = row * BLOCKS_A_ROW
            self._rows.add_blocks(row, [BlockId(block) for block in range(first, first + BLOCKS_A_ROW)])

    def forward(self, num_decodes: int, chunks: Sequence[Chunk]) -> Tensor:
        plan = StepPlan(
            0,
            rows=np.array([chunk.row for chunk in chunks], np.int32),
            num_scheduled_tokens=np.array([chunk.last - chunk.first for chunk in chunks], np.int32),
            num_computed_tokens=np.array([chunk.first for chunk in chunks], np.int32),
            samples=np.ones(len(chunks), np.bool_),
            num_decodes=num_decodes,
        )
        inputs = make_step_inputs(plan, self._rows, self._views, Gathers(self.cache[0], self.cache.dtype))
        return self.decoder.forward(inputs)


class Gpu:
    """`apart`: layers with windows have block tables of their own."""

    def __init__(
        self, config: ModelConfig, weights: Weights, tokens: Tensor, *, batch_invariant: bool, apart: bool = False
    ) -> None:
        spec = (window_spec_of if apart else kv_spec_of)(config, bytes(16), BLOCK_SIZE, "float32")
        num_blocks = len(spec.groups) * len(tokens) * BLOCKS_A_ROW
        self.cache = torch.zeros(spec.page_layers, num_blocks, *spec.block_shape(spec.groups[0]))
        shape = (len(spec.groups), len(tokens), BLOCKS_A_ROW)
        self.tables = torch.arange(num_blocks, dtype=torch.int32).view(shape).unbind()
        self.paged = make_paged(
            WorkerConfig(max_num_requests=len(tokens), batch_invariant=batch_invariant),
            config,
            spec,
            self.cache,
            torch.stack(self.tables),
            torch.float32,
            None,
        )
        tables = cos_sin_tables(config.ropes, config.rope_head_dim, MAX_LEN)
        settings = WorkerConfig(max_num_batched_tokens=64, batch_invariant=batch_invariant)
        device = device_of(settings, self.paged, tables, ())
        self.decoder = make_model(config, weights, device)
        self._tokens = tokens

    def forward(self, num_decodes: int, chunks: Sequence[Chunk], pieces: Pieces | None = None) -> Tensor:
        spans = [torch.arange(chunk.first, chunk.last) for chunk in chunks]
        counts = [len(span) for span in spans]
        rows, positions = torch.tensor([chunk.row for chunk in chunks]), torch.cat(spans)
        row_of_token = rows.repeat_interleave(torch.tensor(counts))
        blocks, offsets = positions // BLOCK_SIZE, positions % BLOCK_SIZE
        slots, *more_slots = (table[row_of_token, blocks] * BLOCK_SIZE + offsets.int() for table in self.tables)
        seq_lens = torch.tensor([chunk.last for chunk in chunks]).int()
        starts = torch.tensor([0, *np.cumsum(counts).tolist()])
        prompts = chunks[num_decodes:]
        step = StepInputs(
            self._tokens[row_of_token, positions].int(),
            positions.int(),
            slots,
            rows.int(),
            seq_lens,
            starts.int(),
            num_decodes,
            self.paged.tiles(counts[num_decodes:], [chunk.first for chunk in prompts]) if prompts else None,
            self.paged.cut(seq_lens[:num_decodes]),
            tuple(more_slots),
        )
        return self.decoder.forward(step, pieces if prompts else None)
