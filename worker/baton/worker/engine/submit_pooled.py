"""Converts submit messages for models that pool to requests of the engine, or refuses them."""

from __future__ import annotations

from baton.rpc.errors import InvalidRequest, Unsupported
from baton.v1 import types_pb2, worker_pb2
from baton.worker.core import (
    HeadKind,
    Int32,
    ModelSpec,
    Pooler,
    PoolingParams,
    PoolingTask,
    Request,
    SamplingParams,
    StopConditions,
    TokenIds,
)

TASKS = {
    types_pb2.POOLING_TASK_EMBED: PoolingTask.EMBED,
    types_pb2.POOLING_TASK_CLASSIFY: PoolingTask.CLASSIFY,
    types_pb2.POOLING_TASK_TOKEN_EMBED: PoolingTask.TOKEN_EMBED,
    types_pb2.POOLING_TASK_TOKEN_CLASSIFY: PoolingTask.TOKEN_CLASSIFY,
}
_NO_SAMPLING = SamplingParams()
_NO_OUTPUT = StopConditions(max_tokens=1)


def pooled_of(
    submit: worker_pb2.SubmitRequest, model: ModelSpec, name: str, now: float, prompt: Int32, block_hashes: bytes
) -> Request:
    """Returns the request to run as `name`, which arrived at `now`. Raises a ServiceError with the field."""
    if model.pooler is None:
        raise Unsupported("this model generates tokens; it has no vectors of texts", field="pooling")
    return Request(
        request_id=name,
        token_ids=TokenIds(prompt),
        num_prompt_tokens=len(prompt),
        block_hashes=block_hashes,
        sampling=_NO_SAMPLING,
        stop=_NO_OUTPUT,
        cache_namespace=submit.cache_namespace,
        priority=submit.priority,
        arrival=now,
        deadline=now + submit.timeout_ms / 1000 if submit.timeout_ms else None,
        traceparent=submit.traceparent,
        tenant=submit.tenant,
        head=HeadKind.POOL,
        pooling=_params_of(submit.pooling, model.pooler, len(prompt)),
    )


def _params_of(pooling: types_pb2.PoolingParams, pooler: Pooler, num_tokens: int) -> PoolingParams:
    task = TASKS.get(pooling.task)
    if task is None:
        names = ", ".join(task.value for task in pooler.tasks)
        raise InvalidRequest(f"pooling.task must be set; this model's tasks: {names}", field="pooling.task")
    if pooling.dimensions:
        _check_dimensions(pooling.dimensions, pooler)
    if pooling.second_text_start and not (pooler.takes_pairs and pooling.second_text_start < num_tokens):
        wanted = f"1 to {num_tokens - 1}, or 0" if pooler.takes_pairs else "0: this model takes no pairs"
        raise InvalidRequest(
            f"pooling.second_text_start is {pooling.second_text_start}; it must be {wanted}",
            field="pooling.second_text_start",
        )
    return PoolingParams(
        task,
        dimensions=pooling.dimensions,
        activation=not pooling.raw,
        second_text_start=pooling.second_text_start,
        reads_all=pooler.reads_all(task),
    )


def _check_dimensions(dimensions: int, pooler: Pooler) -> None:
    if not pooler.cuttable:
        wanted = f"{pooler.width}, or 0: this model's embeddings cannot be cut"
        allowed = dimensions == pooler.width
    elif pooler.dimensions:
        wanted = f"one of {', '.join(map(str, pooler.dimensions))}"
        allowed = dimensions in pooler.dimensions
    else:
        wanted = f"1 to {pooler.width}"
        allowed = dimensions <= pooler.width
    if not allowed:
        raise InvalidRequest(f"pooling.dimensions is {dimensions}; it must be {wanted}", field="pooling.dimensions")
