"""The tasks of models, and the routes for them. Knows nothing of requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from baton.rpc.errors import InvalidRequest
from baton.v1 import types_pb2

Task: TypeAlias = "types_pb2.PoolingTask.ValueType"

GENERATE = "generate"

TASK_NAMES: Mapping[Task, str] = {
    types_pb2.POOLING_TASK_EMBED: "embed",
    types_pb2.POOLING_TASK_CLASSIFY: "classify",
    types_pb2.POOLING_TASK_TOKEN_EMBED: "token_embed",
    types_pb2.POOLING_TASK_TOKEN_CLASSIFY: "token_classify",
}
TASKS: Mapping[str, Task] = {name: task for task, name in TASK_NAMES.items()}
_ROUTES: Mapping[Task, str] = {
    types_pb2.POOLING_TASK_EMBED: "/v1/embeddings",
    types_pb2.POOLING_TASK_CLASSIFY: "/classify",
    types_pb2.POOLING_TASK_TOKEN_EMBED: "/pooling",
    types_pb2.POOLING_TASK_TOKEN_CLASSIFY: "/pooling",
}
_METHODS: Mapping[Task, str] = {
    types_pb2.POOLING_TASK_EMBED: "Embed",
    types_pb2.POOLING_TASK_CLASSIFY: "Classify",
    types_pb2.POOLING_TASK_TOKEN_EMBED: "Pool",
    types_pb2.POOLING_TASK_TOKEN_CLASSIFY: "Pool",
}


class WrongTask(InvalidRequest):
    """A model does not have the task of the route."""

    def __init__(self, reason: str, info: types_pb2.ModelInfo) -> None:
        super().__init__(_advice(reason, info, _ROUTES, "/v1/chat/completions"), field="model")
        self._reason = reason
        self._info = info

    def name_methods(self) -> None:
        """Names methods of gRPC in place of routes."""
        self.message = _advice(self._reason, self._info, _METHODS, "Generate")


def task_names(info: types_pb2.ModelInfo) -> list[str]:
    """Returns what the model does, its main task first."""
    return [TASK_NAMES[task] for task in info.pooler.tasks] if info.HasField("pooler") else [GENERATE]


def check_generates(name: str, info: types_pb2.ModelInfo) -> None:
    """Raises InvalidRequest, which names the right route, for a model that generates no tokens."""
    if info.HasField("pooler"):
        raise WrongTask(f"the model {name} generates no tokens", info)


def check_task(name: str, info: types_pb2.ModelInfo, task: Task) -> types_pb2.PoolerInfo:
    """Returns the model's pooler. Raises InvalidRequest, which names the right route, for a model without the task."""
    if task not in info.pooler.tasks:
        raise WrongTask(f"the model {name} has no task {TASK_NAMES[task]}", info)
    return info.pooler


def check_dimensions(dimensions: int | None, pooler: types_pb2.PoolerInfo, field: str = "dimensions") -> int:
    """Returns the number of values that embeddings are cut to; 0: all. Raises InvalidRequest."""
    if dimensions is None or dimensions == pooler.width:
        return 0
    if not pooler.cuttable:
        allowed = f"{pooler.width}: this model's embeddings cannot be cut"
    elif pooler.dimensions:
        allowed = f"one of {', '.join(map(str, pooler.dimensions))}"
    else:
        allowed = f"1 to {pooler.width}"
    fits = pooler.cuttable and (dimensions in pooler.dimensions if pooler.dimensions else dimensions < pooler.width)
    if not fits:
        raise InvalidRequest(f"{field} is {dimensions}; it must be {allowed}", field=field)
    return dimensions


def _advice(reason: str, info: types_pb2.ModelInfo, ways: Mapping[Task, str], generating: str) -> str:
    served = dict.fromkeys(ways[task] for task in info.pooler.tasks)
    return f"{reason}; use {' or '.join(served) or generating} for it"
