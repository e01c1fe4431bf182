"""Refuses batch-invariant steps on a CPU for models and weight formats whose results depend on other tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from baton.kernels.reference.attention.aligned_latents import AbsorbedHeads
from baton.kernels.reference.linear.packed import can_pack
from baton.rpc.errors import InvalidRequest
from baton.worker.layers.cpu.device import CpuDevice
from baton.worker.layers.latent_spec import LatentSpec
from baton.worker.layers.self_check import columns_of, experts_of, linears_of
from baton.worker.layers.spec import AttentionSpec
from baton.worker.models.config import ModelConfig
from baton.worker.quantization.registry import UNQUANTIZED, UNQUANTIZED_EXPERTS

_ROWS = 5


def check_invariant(config: ModelConfig, weights: Any, device: CpuDevice) -> None:
    """Raises InvalidRequest for what the executor cannot compute so that a token's bits do not depend on others.

    Computes products of random rows, together and one by one.
    """
    if reason := _dependent(config):
        raise _refused(f"under executor=cpu, {reason}")
    if not can_pack(device.dtype):
        raise _refused(f"this PyTorch has no oneDNN linear of {device.dtype}")
    with torch.inference_mode():
        _check_experts(config, weights, device)
        _check_linears(weights, device)
        _check_latents(config, weights, device)


def _check_linears(weights: Any, device: CpuDevice) -> None:
    checked: set[tuple[object, ...]] = set()
    for method, params in linears_of(weights):
        shape = (method.name, *(tuple(one.shape) for one in params.values()))
        if shape not in checked:
            checked.add(shape)
            ops = device.linear_ops(method)
            is_wide = method is UNQUANTIZED and params["weight"].dtype is torch.float32  # of routers, in any dtype
            product = partial(ops.multiply_wide if is_wide else ops.multiply, ops.prepared(params))
            _check(product, columns_of(method, params), f"a product with weights in {method.name}", device)


def _check_experts(config: ModelConfig, weights: Any, device: CpuDevice) -> None:
    """Checks the sums of the first layer's experts, and its router. Refuses formats that have no such sums."""
    stacks = list(experts_of(weights))
    for stack in stacks:
        if stack.method is not UNQUANTIZED_EXPERTS:
            raise _refused(f"under executor=cpu, a sum of experts in {stack.method.name} depends on their tokens")
    if not stacks:
        return
    spec, params = config.experts, stacks[0].params
    assert spec is not None, "experts have a description"
    router, ops = spec.router, device.experts_ops(stacks[0].method)

    def routed(logits: Tensor) -> Tensor:
        weights, ids = device.kernels.route(logits, None, router)
        return torch.cat((weights, ids.float()), 1)

    def summed(x: Tensor) -> Tensor:
        ids = torch.arange(router.top_k).repeat(len(x), 1)
        return ops.run(params, x, torch.full(ids.shape, 1 / router.top_k), ids, spec.gate)

    _check(routed, router.num_experts, "the choice of experts", device)
    _check(summed, params["down"].shape[1], "a sum of experts", device)


def _check_latents(config: ModelConfig, weights: Any, device: CpuDevice) -> None:
    """Checks the products of heads around the latents of the first layer that has some."""
    attention = config.attention
    if not isinstance(attention, LatentSpec):
        return
    first = next(index for index, layer in enumerate(config.layers) if layer.attention is attention)
    kv_b = weights.layers[first].attention.kv_b.view(attention.num_q_heads, -1, attention.kv_rank)
    heads = AbsorbedHeads(kv_b, attention.nope_dim)

    def absorbed(x: Tensor) -> Tensor:
        return heads.values(heads.lifted(x.view(-1, attention.num_q_heads, attention.qk_dim))).flatten(1)

    _check(absorbed, attention.projected_size, "a product of latent attention", device)


def _dependent(config: ModelConfig) -> str:
    """Returns what of a model depends on the step; empty: nothing."""
    attention = [layer.attention for layer in config.layers]
    if config.transformers is not None:
        return f"results of {config.implementation} depend on the batch"
    if not config.cached:
        return "models without a KV cache compute whole batches at once"
    if any(spec.sinks or spec.soft_cap for spec in attention if isinstance(spec, AttentionSpec)):
        return "attention with sinks or soft caps depends on the longest sequence"
    return ""


def _check(product: Callable[[Tensor], Tensor], columns: int, what: str, device: CpuDevice) -> None:
    """Compares a function of random rows together and one by one."""
    x = torch.randn(_ROWS, columns, generator=torch.Generator().manual_seed(0)).to(device.dtype)
    together = product(x).clone()
    alone = torch.cat([product(x[row : row + 1]) for row in range(_ROWS)])
    if not torch.equal(together, alone):
        raise _refused(f"{what} depends on the number of rows")


def _refused(reason: str) -> InvalidRequest:
    return InvalidRequest(f"batch_invariant=True: {reason}", field="batch_invariant")
