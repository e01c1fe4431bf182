"""Errors of the device: those that end one step, and those that end the device."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from baton.rpc.errors import InvalidRequest
from baton.worker.config import WorkerConfig
from baton.worker.executors.base import DeviceLost
from baton.worker.models.config import ModelConfig

_log = logging.getLogger(__name__)

_COMPILER_ERRORS = ("OutOfResources", "CompilationError", "PTXASError")


def raise_if_lost(error: BaseException, synchronize: Callable[[], None]) -> None:
    """Raises DeviceLost if the device is lost.

    After an illegal access every call fails until the process ends. Errors such as out of memory, or a rejected launch,
    do not affect the device.
    """
    try:
        synchronize()
    except Exception as probe:
        first = str(probe).partition("\n")[0]
        _log.critical("the GPU is lost: %s; the worker must be started again", first)
        raise DeviceLost(f"the GPU is lost ({first}): every step would fail; start the worker again") from error


def refusal_of(error: BaseException, config: WorkerConfig, model: ModelConfig, dtype: str) -> InvalidRequest | None:
    """Returns advice to the operator for an error of the first steps; None if the operator cannot fix it."""
    kind = type(error).__name__
    if isinstance(error, torch.OutOfMemoryError):
        first = str(error).partition("\n")[0].partition(". Of the allocated")[0]
        return InvalidRequest(
            f"a step of {config.max_num_batched_tokens} tokens does not fit beside the weights ({first}): lower "
            "max_num_batched_tokens or max_num_requests, or free the GPU",
            field="max_num_batched_tokens",
        )
    if kind in _COMPILER_ERRORS:
        return InvalidRequest(
            f"the kernels cannot be made for head_dim {model.head_dim}, {model.num_q_heads} query and "
            f"{model.num_kv_heads} KV heads, dtype {dtype} and block_size {config.block_size} on this GPU ({kind}: "
            f"{str(error).partition(chr(10))[0]}): try dtype bfloat16",
            field="model",
        )
    return None
