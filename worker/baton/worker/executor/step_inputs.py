"""A plan and the batch become the tensors that all layers of a step share."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from baton.kernels.reference.paged_attention import PrefillPlan, Scratch, plan_decode, plan_gather
from baton.worker.core import StepPlan
from baton.worker.executor.rows import Int64, Rows
from baton.worker.model.config import ModelConfig
from baton.worker.model.decoder import DecodeGroup, PrefillChunk, StepInputs

# A group of decodes reads as many blocks a sequence as its longest has: one group is one launch a layer more,
# a short sequence in a long one's group reads that much for nothing.
_GROUP_COST_BLOCKS = 32


def make_step_inputs(plan: StepPlan, rows: Rows, config: ModelConfig, cache: Tensor, scratch: Scratch) -> StepInputs:
    """For a plan whose rows hold all that it names. cache is any layer's: what counts is its shape."""
    scheduled = plan.num_scheduled_tokens.astype(np.int64)
    computed = plan.num_computed_tokens.astype(np.int64)
    starts = np.cumsum(scheduled) - scheduled
    row_of_token = np.repeat(plan.rows, scheduled).astype(np.int64)
    positions = np.arange(len(row_of_token)) + np.repeat(computed - starts, scheduled)
    return StepInputs(
        token_ids=torch.from_numpy(rows.token_ids[row_of_token, positions].astype(np.int64)),
        positions=torch.from_numpy(positions),
        block_ids=torch.from_numpy(rows.blocks_at(row_of_token, positions)),
        offsets=torch.from_numpy(positions % rows.block_size),
        decodes=list(_decode_groups(plan, rows, config, cache, scratch)),
        prefills=list(_prefill_chunks(plan, rows, config, starts, cache, scratch)),
    )


def group_by_length(num_blocks: Int64, group_cost: int = _GROUP_COST_BLOCKS) -> list[Int64]:
    """Indices of sequences in groups, the longest first, so that padding costs less than the groups do."""
    order = np.argsort(-num_blocks, kind="stable")
    groups: list[Int64] = []
    start = 0
    while start < len(order):
        lengths = num_blocks[order[start:]]
        # Cutting after the first c leaves (rest) x (longest - longest of the rest) blocks unread.
        rest = np.arange(len(lengths) - 1, 0, -1)
        saved = rest * (lengths[0] - lengths[1:])
        cut = int(saved.argmax()) + 1 if len(rest) and saved.max() > group_cost else len(lengths)
        groups.append(np.sort(order[start : start + cut]))
        start += cut
    return groups


def _decode_groups(
    plan: StepPlan, rows: Rows, config: ModelConfig, cache: Tensor, scratch: Scratch
) -> Iterator[DecodeGroup]:
    count = plan.num_decodes
    if count == 0:
        return
    decode_rows = plan.rows[:count].astype(np.int64)
    seq_lens = plan.num_computed_tokens[:count].astype(np.int64) + 1
    groups = group_by_length(-(-seq_lens // rows.block_size))
    for tokens in groups:
        table = torch.from_numpy(rows.block_table(decode_rows[tokens], seq_lens[tokens]))
        lengths = torch.from_numpy(seq_lens[tokens])
        gather = plan_gather(table, cache, scratch)
        plans = {
            window: plan_decode(gather, lengths, table.shape[1] * rows.block_size, window)
            for window in set(config.windows)
        }
        yield DecodeGroup(torch.from_numpy(tokens) if len(groups) > 1 else None, len(tokens), plans)


def _prefill_chunks(
    plan: StepPlan, rows: Rows, config: ModelConfig, starts: Int64, cache: Tensor, scratch: Scratch
) -> Iterator[PrefillChunk]:
    for index in range(plan.num_decodes, len(plan.rows)):
        start, count = int(starts[index]), int(plan.num_scheduled_tokens[index])
        seq_len = int(plan.num_computed_tokens[index]) + count
        table = rows.block_table(plan.rows[index : index + 1].astype(np.int64), np.array([seq_len]))
        gather = plan_gather(torch.from_numpy(table), cache, scratch)
        plans = {window: PrefillPlan(gather, seq_len, count, window) for window in set(config.windows)}
        yield PrefillChunk(start, start + count, plans)
