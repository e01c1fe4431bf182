"""Computes the scales of quantized KV by steps on the GPU."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from baton.worker.core import StepPlan
from baton.worker.executors.cuda.startup.memory import allocate_kv
from baton.worker.kv_spec import KvSpec
from baton.worker.layers.cuda.attention import PagedAttention
from baton.worker.layers.kv_scale_meter import KvScaleMeter, Staging
from baton.worker.layers.spec import AttentionSpec


def compute_scales(
    paged: PagedAttention, attention: AttentionSpec, kv: KvSpec, plans: list[StepPlan], run: Callable[[StepPlan], None]
) -> Tensor:
    """Sets the scales of all layers by running the plans, over blocks of their own. Returns them, [num_layers, 2]."""
    scales = [scale for scale in paged.kv_scales if scale is not None]
    longest = max(plan.num_tokens for plan in plans)
    device, kv_dtype, before = paged.cache.device, paged.cache.dtype, paged.cache
    paged.meter = KvScaleMeter(scales, Staging(attention, kv.block_size, longest, paged.dtype))
    paged.cache = allocate_kv(kv, kv_dtype, len(kv.groups) * -(-longest // kv.block_size), device)
    try:
        for plan in plans:
            run(plan)
        return paged.meter.scales()
    finally:
        paged.meter, paged.cache = None, before
