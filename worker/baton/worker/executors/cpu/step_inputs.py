"""Converts a plan to the tensors that all layers of a step share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from baton.kernels.reference.attention.aligned_attention import TILE, AlignedPlan, plan_aligned, tile_keys
from baton.kernels.reference.attention.paged_attention import (
    DecodePlan,
    Gather,
    PrefillPlan,
    Scratch,
    plan_decode,
    plan_gather,
)
from baton.worker.core import Int64, StepPlan
from baton.worker.executors.cpu.rows import Rows
from baton.worker.layers.cpu.states import StateRun
from baton.worker.layers.cpu.step import DecodeGroup, PrefillChunk, StepInputs, View

# All sequences in a group of decodes read as many blocks as its longest. Each group costs one launch per layer; a short
# sequence in the group of a long one reads blocks in vain.
_GROUP_COST_BLOCKS = 32
_MAX_GATHERED_BLOCKS = 1 << 15  # of a group, which verified drafts and recomputed outputs may exceed

Plan = TypeVar("Plan", DecodePlan, PrefillPlan)


def views_of(windows: Sequence[int], groups: Sequence[int]) -> tuple[View, ...]:
    """Returns the distinct views of a model's layers, by the window and the KV group of each layer."""
    return tuple(dict.fromkeys(map(View, groups, windows)))


class Gathers:
    """Makes the gathers of block tables, over scratch memory that all share."""

    def __init__(self, cache: Tensor, dtype: torch.dtype) -> None:
        """`cache`: of any layer, whose shape is used; `dtype`: what it is computed in."""
        self.block_size = cache.shape[3]
        self._cache = cache
        self._scratch = Scratch(cache, dtype)
        self._stored = None if cache.dtype is dtype else Scratch(cache, torch.uint8)

    def of(self, table: Int64) -> Gather:
        """Returns the gather of a block table [num_seqs, max_blocks]."""
        return plan_gather(torch.from_numpy(table), self._cache, self._scratch, self._stored)


class _Queries(NamedTuple):
    """Tokens whose attention is computed one by one, as that of a decode's token."""

    tokens: Int64  # indices into the step's tokens
    rows: Int64
    seq_lens: Int64  # keys that each attends to


def make_step_inputs(
    plan: StepPlan,
    rows: Rows,
    views: Sequence[View],
    gathers: Gathers,
    states: Mapping[int, Sequence[StateRun]] = MappingProxyType({}),
    *,
    aligned: bool = False,  # the attention of a token does not depend on the step, bit for bit
) -> StepInputs:
    """Returns the inputs of a plan that `Rows.check` accepts."""
    groups = sorted({view.group for view in views})
    scheduled = plan.num_scheduled_tokens.astype(np.int64)
    computed = plan.num_computed_tokens.astype(np.int64)
    starts = np.cumsum(scheduled) - scheduled
    row_of_token = np.repeat(plan.rows, scheduled).astype(np.int64)
    positions = np.arange(len(row_of_token)) + np.repeat(computed - starts, scheduled)
    alone = np.zeros(len(row_of_token), np.bool_)
    alone[: int(scheduled[: plan.num_decodes].sum())] = True
    if aligned:  # an output that is computed again gets the attention of its decodes
        alone |= positions >= rows.num_prompt_tokens[row_of_token]
    tokens = np.flatnonzero(alone)
    queries = _Queries(tokens, row_of_token[tokens], positions[tokens] + 1)
    return StepInputs(
        token_ids=torch.from_numpy(rows.token_ids[row_of_token, positions].astype(np.int64)),
        positions=torch.from_numpy(positions),
        block_ids=[torch.from_numpy(rows.blocks_at(row_of_token, positions, group)) for group in groups],
        offsets=torch.from_numpy(positions % rows.block_size),
        decodes=list(_decode_groups(queries, rows, views, gathers, aligned)),
        prefills=list(_prefill_chunks(plan, rows, views, starts, gathers, aligned)),
        states=states,
    )


def group_by_length(num_blocks: Int64, group_cost: int = _GROUP_COST_BLOCKS) -> list[Int64]:
    """Returns groups of sequence indices, the longest first, so that padding costs less than more groups would."""
    order = np.argsort(-num_blocks, kind="stable")
    groups: list[Int64] = []
    start = 0
    while start < len(order):
        lengths = num_blocks[order[start:]]
        # A cut after the first c saves (number of the rest) x (longest - longest of the rest) blocks.
        rest = np.arange(len(lengths) - 1, 0, -1)
        saved = rest * (lengths[0] - lengths[1:])
        cut = int(saved.argmax()) + 1 if len(rest) and saved.max() > group_cost else len(lengths)
        groups.append(np.sort(order[start : start + cut]))
        start += cut
    return groups


def _decode_groups(
    queries: _Queries, rows: Rows, views: Sequence[View], gathers: Gathers, aligned: bool
) -> Iterator[DecodeGroup]:
    if not len(queries.tokens):
        return
    num_blocks = -(-queries.seq_lens // rows.block_size)
    groups = [part for group in group_by_length(num_blocks) for part in _within_memory(group, num_blocks)]
    for group in groups:
        lengths = queries.seq_lens[group]
        table_of = partial(rows.block_table, queries.rows[group], lengths)
        plans = _by_view(views, int(lengths.max()), table_of, partial(_plan_decode, gathers, lengths, aligned))
        first = len(groups) == 1 and int(queries.tokens[-1]) == len(group) - 1
        yield DecodeGroup(None if first else torch.from_numpy(queries.tokens[group]), len(group), plans)


def _within_memory(group: Int64, num_blocks: Int64) -> list[Int64]:
    """Cuts a group into some that each gather at most _MAX_GATHERED_BLOCKS, or one sequence."""
    most = max(1, _MAX_GATHERED_BLOCKS // int(num_blocks[group].max()))
    return [group[start : start + most] for start in range(0, len(group), most)]


def _prefill_chunks(
    plan: StepPlan, rows: Rows, views: Sequence[View], starts: Int64, gathers: Gathers, aligned: bool
) -> Iterator[PrefillChunk]:
    for index in range(plan.num_decodes, len(plan.rows)):
        start, count = int(starts[index]), int(plan.num_scheduled_tokens[index])
        computed, row = int(plan.num_computed_tokens[index]), int(plan.rows[index])
        if aligned:
            count = min(count, int(rows.num_prompt_tokens[row]) - computed)
            if count > 0:
                make = partial(_plan_aligned, gathers, rows, row, computed, count)
                yield PrefillChunk(start, start + count, {view: make(view) for view in views})
            continue
        seq_len = computed + count
        table_of = partial(rows.block_table, np.array([row]), np.array([seq_len]))
        plans = _by_view(views, seq_len, table_of, partial(_plan_prefill, gathers, seq_len, count))
        yield PrefillChunk(start, start + count, plans)


def _by_view(
    views: Sequence[View], longest: int, table_of: Callable[[int], Int64], make: Callable[[Int64, int], Plan]
) -> dict[View, Plan]:
    """Returns a plan for each view. Windows of at least `longest` tokens share their group's plan without a window."""
    needed = {view: view if view.window < longest else View(view.group, 0) for view in views}
    tables = {group: table_of(group) for group in {view.group for view in views}}
    made = {view: make(tables[view.group], view.window) for view in set(needed.values())}
    return {view: made[used] for view, used in needed.items()}


def _plan_decode(gathers: Gathers, seq_lens: Int64, aligned: bool, table: Int64, window: int) -> DecodePlan:
    block_size = gathers.block_size
    if window:
        first = np.maximum(seq_lens - window, 0) // block_size
        table, seq_lens = blocks_between(table, first, -(-seq_lens // block_size)), seq_lens - first * block_size
    if aligned:  # the sums over keys have an order that depends on the number of keys, but not of tiles
        width = -(-table.shape[1] * block_size // TILE) * TILE // block_size
        table = np.pad(table, ((0, 0), (0, max(0, width - table.shape[1]))), mode="edge")
    return plan_decode(gathers.of(table), torch.from_numpy(seq_lens), table.shape[1] * block_size, window)


def _plan_prefill(gathers: Gathers, seq_len: int, num_tokens: int, table: Int64, window: int) -> PrefillPlan:
    if window:
        # First key that the chunk's first query attends to.
        first = max(seq_len - num_tokens - window + 1, 0) // gathers.block_size
        table, seq_len = table[:, first:], seq_len - first * gathers.block_size
    return PrefillPlan(gathers.of(table), seq_len, num_tokens, window)


def _plan_aligned(gathers: Gathers, rows: Rows, row: int, start: int, num_tokens: int, view: View) -> AlignedPlan:
    block_size = gathers.block_size
    first, end = tile_keys(start, num_tokens, view.window)
    first //= block_size
    table = rows.blocks_of(row, first, -(-end // block_size), -(-(start + num_tokens) // block_size), view.group)
    return plan_aligned(gathers.of(table[None]), first * block_size, start, num_tokens, view.window)


def blocks_between(table: Int64, first: Int64, stop: Int64) -> Int64:
    """Returns columns `first` to `stop` of each row of a block table, padded with later ones or the last one."""
    columns = first[:, None] + np.arange(int((stop - first).max()))
    return np.take_along_axis(table, np.minimum(columns, table.shape[1] - 1), axis=1)
