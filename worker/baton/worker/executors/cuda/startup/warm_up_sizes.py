"""The numbers of tokens at which a model's packed linears and experts take other kernels, or other tiles of one.

A start runs a step of each, so that none is compiled while requests run. Kernels that depend on other things are those
of warm_up's steps.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from typing import Any

import torch

from baton.kernels.linear.quantized.choice import MANY, kernel_for
from baton.kernels.packed.launch import has_e4m3
from baton.kernels.packed.weight import PackedWeight, readable
from baton.kernels.table import Case, find
from baton.worker.executors.choices import experts_kind
from baton.worker.layers.self_check import packed_parts
from baton.worker.layers.spec import ExpertsSpec
from baton.worker.models.config import ModelConfig
from baton.worker.quantization.quantized.method import PackedMethod

_LARGEST_TILE = 128  # pairs
_HOPPER = 9  # major version of the compute capability
_GROWTH = 32  # sizes between n and 2 n are looked at n / 32 apart

Variant = Callable[[int], Hashable]  # of a number of tokens: what its kernels are compiled for


def warm_up_sizes(model: ModelConfig, weights: Any, case: Case, most: int, device: torch.device) -> list[int]:
    """Returns a number of tokens, up to `most`, of each variant of the kernels of packed linears and of experts.

    `case` has the device, the dtype of activations and the settings.
    """
    of_device = replace(case, weights=experts_kind(weights, has_e4m3=has_e4m3(device)))
    variants = [*_linears(weights, of_device, device), *_experts(model, of_device)]
    found: dict[Hashable, int] = {}
    if variants:
        for size in _sizes(most):
            found.setdefault(tuple(variant(size) for variant in variants), size)
    return list(found.values())


def _sizes(most: int) -> Iterator[int]:
    size = 1
    while size <= most:
        yield size
        size += max(1, size // _GROWTH)


def _linears(weights: Any, case: Case, device: torch.device) -> Iterator[Variant]:
    """Yields that of each way that linears are packed."""
    seen: set[Hashable] = set()
    for method, params in packed_parts(weights):
        if not isinstance(method, PackedMethod):
            continue
        weight = method.packed_weight(params)
        weight = weight._replace(stored=readable(weight.stored, has_e4m3=has_e4m3(device)))
        columns = next(iter(params.values())).shape[1]
        if (method.name, weight.num_rows, columns) not in seen:
            seen.add((method.name, weight.num_rows, columns))
            yield _of_linear(weight, columns, case)


def _of_linear(weight: PackedWeight, columns: int, case: Case) -> Variant:
    has_scaled_mm = case.capability == _HOPPER and case.dtype is torch.bfloat16

    def variant(num_tokens: int) -> Hashable:
        kernel = kernel_for(
            num_tokens,
            weight,
            columns,
            is_half=case.dtype is not torch.float32,
            has_scaled_mm=has_scaled_mm,
            batch_invariant=case.batch_invariant,
        )
        return kernel, _power(min(num_tokens, MANY))

    return variant


def _experts(model: ModelConfig, case: Case) -> Iterator[Variant]:
    """Yields that of each router."""
    for router in {layer.mlp.router for layer in model.layers if isinstance(layer.mlp, ExpertsSpec)}:
        of_router = replace(case, num_experts=router.num_experts)

        def variant(num_tokens: int, case: Case = of_router, top_k: int = router.top_k) -> Hashable:
            pairs = num_tokens * top_k
            tile = _power(-(-5 * pairs // (4 * case.num_experts)))
            return find("run_experts", replace(case, num_pairs=pairs)), min(_LARGEST_TILE, tile)

        yield variant


def _power(number: int) -> int:
    """Returns the next power of 2."""
    return 1 << max(0, number - 1).bit_length()
