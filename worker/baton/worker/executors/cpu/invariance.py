"""Refuses batch-invariant steps on a CPU for models and weight formats whose results depend on other tokens."""

from __future__ import annotations

from typing import Any

import torch

from baton.kernels.reference.linear.packed import can_pack
from baton.rpc.errors import InvalidRequest
from baton.worker.layers.cpu.device import CpuDevice
from baton.worker.layers.self_check import columns_of, linears_of
from baton.worker.layers.spec import AttentionSpec
from baton.worker.models.config import ModelConfig
from baton.worker.quantization.base import Params, QuantMethod

_ROWS = 5


def check_invariant(config: ModelConfig, weights: Any, device: CpuDevice) -> None:
    """Raises InvalidRequest for what the executor cannot compute so that a token's bits do not depend on others.

    Multiplies random rows by a linear of each format and shape, together and one by one.
    """
    if reason := _dependent(config):
        raise _refused(f"under executor=cpu, {reason}")
    if not can_pack(device.dtype):
        raise _refused(f"this PyTorch has no oneDNN linear of {device.dtype}")
    checked: set[tuple[object, ...]] = set()
    with torch.inference_mode():
        for method, params in linears_of(weights):
            shape = (method.name, *(tuple(one.shape) for one in params.values()))
            if shape not in checked:
                checked.add(shape)
                _check(method, params, device)


def _dependent(config: ModelConfig) -> str:
    """Returns what of a model depends on the step; empty: nothing."""
    attention = [layer.attention for layer in config.layers]
    if config.transformers is not None:
        return f"results of {config.implementation} depend on the batch"
    if not config.cached:
        return "models without a KV cache compute whole batches at once"
    if config.experts is not None:
        return "a product of experts depends on the number of their tokens"
    if not all(isinstance(spec, AttentionSpec) for spec in attention):
        return "only attention over keys and values of heads is computed query by query"
    if any(spec.sinks or spec.soft_cap for spec in attention if isinstance(spec, AttentionSpec)):
        return "attention with sinks or soft caps depends on the longest sequence"
    return ""


def _check(method: QuantMethod, params: Params, device: CpuDevice) -> None:
    columns = columns_of(method, params)
    x = torch.randn(_ROWS, columns, generator=torch.Generator().manual_seed(0)).to(device.dtype)
    ops = device.linear_ops(method)
    prepared = ops.prepared(params)
    together = ops.multiply(prepared, x).clone()
    alone = torch.cat([ops.multiply(prepared, x[row : row + 1]) for row in range(_ROWS)])
    if not torch.equal(together, alone):
        raise _refused(f"a product with weights in {method.name} depends on the number of rows")


def _refused(reason: str) -> InvalidRequest:
    return InvalidRequest(f"batch_invariant=True: {reason}", field="batch_invariant")
