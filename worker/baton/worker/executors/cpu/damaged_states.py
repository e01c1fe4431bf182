"""Finds requests whose recurrent states hold NaN: they fail, and get no token."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from baton.rpc.errors import DataLoss, ServiceError
from baton.worker.core import StepPlan, StepResult
from baton.worker.executors.host.state_tables import StateTables
from baton.worker.kv_spec import KvSpec
from baton.worker.layers.state_places import StatePlaces


def damaged_rows(
    hidden: Tensor, plan: StepPlan, spec: KvSpec, tables: Mapping[int, StateTables], places: Mapping[int, StatePlaces]
) -> dict[int, ServiceError]:
    """Returns the errors of a step's rows, by index into the plan's, whose states hold NaN after the step.

    A NaN in a state reaches every later hidden state of its sequence, hidden [num_tokens, hidden_size]. So states are
    read only of rows that have one there.
    """
    if not tables or not bool(hidden.sum().isnan()):
        return {}
    last = torch.from_numpy(np.cumsum(plan.num_scheduled_tokens, dtype=np.int64) - 1)
    after = plan.num_computed_tokens + plan.num_scheduled_tokens
    found: dict[int, ServiceError] = {}
    for index in hidden[last].isnan().any(1).nonzero().flatten().tolist():
        for group, table in tables.items():
            pages = torch.from_numpy(table.pages(plan, slice(index, index + 1))[1])
            for place, layer in enumerate(spec.groups[group].layers):
                if index not in found and bool(places[group].load(place, pages).isnan().any()):
                    found[index] = _error(layer, int(after[index]))
    return found


def without_tokens(result: StepResult, failed: Mapping[int, ServiceError]) -> None:
    """Adds failed rows to a result, and drops their tokens."""
    if not failed:
        return
    owners = np.repeat(np.arange(len(result.counts)), result.counts)
    kept = np.flatnonzero(~np.isin(owners, list(failed)))
    places = {int(before): after for after, before in enumerate(kept)}
    result.token_ids = result.token_ids[kept]
    result.logprobs = {places[index]: entry for index, entry in result.logprobs.items() if index in places}
    result.prompt_logprobs = {index: each for index, each in result.prompt_logprobs.items() if index not in failed}
    result.counts[list(failed)] = 0
    result.failed |= failed


def _error(layer: int, num_tokens: int) -> DataLoss:
    return DataLoss(
        f"the state of layer {layer} holds NaN after {num_tokens} tokens of this request: its weights or its cache are "
        "damaged; the request ends without a token that depends on it"
    )
