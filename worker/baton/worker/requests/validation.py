"""Checks at submit whether an engine can ever serve a request. Pure."""

from __future__ import annotations

import numpy as np

from baton.rpc.block_hash import HASH_BYTES
from baton.rpc.errors import InvalidRequest, Unsupported
from baton.worker.core import Int32, ModelSpec, Request
from baton.worker.requests.state import num_blocks_for


def check_request(request: Request, vocab_size: int, max_model_len: int, num_blocks: int, block_size: int) -> None:
    """Raises InvalidRequest for a request that could never run here."""
    num_tokens = len(request.token_ids)
    if num_tokens == 0 or not 0 < request.num_prompt_tokens <= num_tokens:
        raise InvalidRequest(
            f"the prompt has {request.num_prompt_tokens} of {num_tokens} tokens; it needs at least 1",
            field="prompt_token_ids",
        )
    most = max_model_len if request.pooling is not None else max_model_len - 1  # one for the output
    if num_tokens > most:
        needed = f" and needs {num_blocks_for(num_tokens, block_size)} blocks of {block_size}" if num_blocks else ""
        pool = f", its pool {num_blocks} blocks" if num_blocks else ""
        raise InvalidRequest(
            f"the prompt has {num_tokens} tokens{needed}; this worker takes at most {most} (its limit is "
            f"{max_model_len} tokens with the output{pool})",
            field="prompt_token_ids",
        )
    check_token_ids(request.token_ids.array(), vocab_size, "prompt_token_ids")
    _check_stop(request)
    if len(request.cache_namespace) != HASH_BYTES:
        raise InvalidRequest(
            f"cache_namespace has {len(request.cache_namespace)} bytes; it must have {HASH_BYTES}",
            field="cache_namespace",
        )


def check_head(request: Request, model: ModelSpec) -> None:
    """Raises Unsupported where the model has no such head, or its head no such task."""
    if request.head not in model.heads:
        names = ", ".join(head.value for head in model.heads) or "none"
        raise Unsupported(f"this model has no head {request.head.value}; its heads: {names}", field="model")
    tasks = () if model.pooler is None else model.pooler.tasks
    if request.pooling is not None and request.pooling.task not in tasks:
        names = ", ".join(task.value for task in tasks)
        raise Unsupported(f"this model has no task {request.pooling.task.value}; its tasks: {names}", field="model")


def check_token_ids(token_ids: Int32, vocab_size: int, field: str) -> None:
    """Raises InvalidRequest if a token is not in the vocabulary."""
    unsigned = token_ids.view(np.uint32)  # as in the contract
    if len(unsigned) and unsigned.max() >= vocab_size:
        index = int((unsigned >= vocab_size).argmax())
        raise InvalidRequest(
            f"{field}[{index}] is {unsigned[index]}; the vocabulary has {vocab_size} tokens: allowed are 0 to "
            f"{vocab_size - 1}",
            field=field,
        )


def _check_stop(request: Request) -> None:
    stop = request.stop
    if stop.max_tokens < 1:
        raise InvalidRequest(f"max_tokens is {stop.max_tokens}; it must be at least 1", field="max_tokens")
    if not 0 <= stop.min_tokens <= stop.max_tokens:
        raise InvalidRequest(
            f"min_tokens is {stop.min_tokens}; it must be between 0 and max_tokens ({stop.max_tokens})",
            field="min_tokens",
        )
