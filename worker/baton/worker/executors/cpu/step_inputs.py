"""Converts a plan to the tensors that all layers of a step share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from baton.kernels.reference.attention.paged_attention import DecodePlan, PrefillPlan, Scratch, plan_decode, plan_gather
from baton.worker.core import Int64, StepPlan
from baton.worker.executors.cpu.rows import Rows
from baton.worker.layers.cpu.step import DecodeGroup, PrefillChunk, StepInputs, View

# All sequences in a group of decodes read as many blocks as its longest. Each group costs one launch per layer; a short
# sequence in the group of a long one reads blocks in vain.
_GROUP_COST_BLOCKS = 32

Plan = TypeVar("Plan", DecodePlan, PrefillPlan)


def views_of(windows: Sequence[int], groups: Sequence[int]) -> tuple[View, ...]:
    """Returns the distinct views of a model's layers, by the window and the KV group of each layer."""
    return tuple(dict.fromkeys(map(View, groups, windows)))


def make_step_inputs(plan: StepPlan, rows: Rows, views: Sequence[View], cache: Tensor, scratch: Scratch) -> StepInputs:
    """Returns the inputs of a plan that `Rows.check` accepts. `cache` is that of any layer; only its shape is used."""
    groups = sorted({view.group for view in views})
    scheduled = plan.num_scheduled_tokens.astype(np.int64)
    computed = plan.num_computed_tokens.astype(np.int64)
    starts = np.cumsum(scheduled) - scheduled
    row_of_token = np.repeat(plan.rows, scheduled).astype(np.int64)
    positions = np.arange(len(row_of_token)) + np.repeat(computed - starts, scheduled)
    return StepInputs(
        token_ids=torch.from_numpy(rows.token_ids[row_of_token, positions].astype(np.int64)),
        positions=torch.from_numpy(positions),
        block_ids=[torch.from_numpy(rows.blocks_at(row_of_token, positions, group)) for group in groups],
        offsets=torch.from_numpy(positions % rows.block_size),
        decodes=list(_decode_groups(plan, rows, views, cache, scratch)),
        prefills=list(_prefill_chunks(plan, rows, views, starts, cache, scratch)),
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
    plan: StepPlan, rows: Rows, views: Sequence[View], cache: Tensor, scratch: Scratch
) -> Iterator[DecodeGroup]:
    count = plan.num_decodes
    if count == 0:
        return
    decode_rows = plan.rows[:count].astype(np.int64)
    seq_lens = plan.num_computed_tokens[:count].astype(np.int64) + 1
    groups = group_by_length(-(-seq_lens // rows.block_size))
    for tokens in groups:
        lengths = seq_lens[tokens]
        table_of = partial(rows.block_table, decode_rows[tokens], lengths)
        plans = _by_view(views, int(lengths.max()), table_of, partial(_plan_decode, cache, scratch, lengths))
        yield DecodeGroup(torch.from_numpy(tokens) if len(groups) > 1 else None, len(tokens), plans)


def _prefill_chunks(
    plan: StepPlan, rows: Rows, views: Sequence[View], starts: Int64, cache: Tensor, scratch: Scratch
) -> Iterator[PrefillChunk]:
    for index in range(plan.num_decodes, len(plan.rows)):
        start, count = int(starts[index]), int(plan.num_scheduled_tokens[index])
        seq_len = int(plan.num_computed_tokens[index]) + count
        table_of = partial(rows.block_table, plan.rows[index : index + 1].astype(np.int64), np.array([seq_len]))
        plans = _by_view(views, seq_len, table_of, partial(_plan_prefill, cache, scratch, seq_len, count))
        yield PrefillChunk(start, start + count, plans)


def _by_view(
    views: Sequence[View], longest: int, table_of: Callable[[int], Int64], make: Callable[[Int64, int], Plan]
) -> dict[View, Plan]:
    """Returns a plan for each view. Windows of at least `longest` tokens share their group's plan without a window."""
    needed = {view: view if view.window < longest else View(view.group, 0) for view in views}
    tables = {group: table_of(group) for group in {view.group for view in views}}
    made = {view: make(tables[view.group], view.window) for view in set(needed.values())}
    return {view: made[used] for view, used in needed.items()}


def _plan_decode(cache: Tensor, scratch: Scratch, seq_lens: Int64, table: Int64, window: int) -> DecodePlan:
    block_size = cache.shape[3]
    if window:
        first = np.maximum(seq_lens - window, 0) // block_size
        table, seq_lens = blocks_between(table, first, -(-seq_lens // block_size)), seq_lens - first * block_size
    gather = plan_gather(torch.from_numpy(table), cache, scratch)
    return plan_decode(gather, torch.from_numpy(seq_lens), table.shape[1] * block_size, window)


def _plan_prefill(
    cache: Tensor, scratch: Scratch, seq_len: int, num_tokens: int, table: Int64, window: int
) -> PrefillPlan:
    if window:
        # First key that the chunk's first query attends to.
        first = max(seq_len - num_tokens - window + 1, 0) // cache.shape[3]
        table, seq_len = table[:, first:], seq_len - first * cache.shape[3]
    return PrefillPlan(plan_gather(torch.from_numpy(table), cache, scratch), seq_len, num_tokens, window)


def blocks_between(table: Int64, first: Int64, stop: Int64) -> Int64:
    """Returns columns `first` to `stop` of each row of a block table, padded with later ones or the last one."""
    columns = first[:, None] + np.arange(int((stop - first).max()))
    return np.take_along_axis(table, np.minimum(columns, table.shape[1] - 1), axis=1)
