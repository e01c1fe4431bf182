"""The workers that may take a request, and why others may not. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from baton.router.fleet.served_models import serves
from baton.router.fleet.worker_view import WorkerView
from baton.router.placement.worker_snapshot import Demand, WorkerSnapshot
from baton.v1 import types_pb2


def usable(
    views: Sequence[WorkerView], model: types_pb2.ModelInfo, excluded: Collection[str]
) -> tuple[list[WorkerView], dict[str, str]]:
    """Returns the live workers that serve the model and take new requests, and why each other one does not.

    Stalled workers are included only if no other worker decodes.
    """
    kept: list[WorkerView] = []
    stalled: list[WorkerView] = []
    refused: dict[str, str] = {}
    for view in views:
        if not serves(view, model):
            continue
        if view.worker_id in excluded:
            refused[view.worker_id] = "has just failed this request"
        elif view.draining:
            refused[view.worker_id] = "drains"
        elif view.cordoned:
            refused[view.worker_id] = "is cordoned"
        elif view.stalled:
            stalled.append(view)
            refused[view.worker_id] = "is stalled in a step"
        else:
            kept.append(view)
    if stalled and not any(view.can_decode for view in kept):
        kept += [view for view in stalled if view.can_decode]
        refused = {worker_id: reason for worker_id, reason in refused.items() if worker_id not in _ids(kept)}
    return kept, refused


def _ids(views: Sequence[WorkerView]) -> set[str]:
    return {view.worker_id for view in views}


def with_capacity(snapshots: Sequence[WorkerSnapshot], demand: Demand, max_queue_depth: int) -> list[WorkerSnapshot]:
    """Returns the workers whose pools can hold the prompt and one token, and whose queues are within their bound.

    Waiting requests that this one overtakes do not count.
    """
    num_tokens = demand.num_prompt_tokens
    return [
        one
        for one in snapshots
        if one.num_waiting - one.num_behind < max_queue_depth and num_tokens <= one.view.max_prompt_tokens
    ]


def can_ever_hold(snapshot: WorkerSnapshot, demand: Demand) -> bool:
    """Whether the prompt and one token fit the worker's pool at all. A pool of unknown size holds everything."""
    return demand.num_prompt_tokens <= snapshot.view.max_prompt_tokens
