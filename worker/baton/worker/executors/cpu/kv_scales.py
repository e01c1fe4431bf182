"""Computes the scales of quantized KV by steps on the CPU."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from baton.worker.core import StepPlan
from baton.worker.executors.host.kv_memory import KvMemory
from baton.worker.kv_spec import KvSpec
from baton.worker.layers.cpu.kv import PagedKv
from baton.worker.layers.kv_scale_meter import KvScaleMeter


def compute_scales(kv: PagedKv, spec: KvSpec, plans: list[StepPlan], run: Callable[[StepPlan], None]) -> Tensor:
    """Sets the scales of all layers by running the plans, over blocks of their own. Returns them, [num_layers, 2]."""
    assert kv.scales is not None, "quantized KV has scales"
    longest = max(plan.num_tokens for plan in plans)
    blocks = len(spec.groups) * -(-longest // spec.block_size)
    memory, before = KvMemory(spec, blocks, kv.cache[0].dtype), kv.cache
    kv.meter = KvScaleMeter(kv.scales)
    kv.cache = [memory.tensors[layer] for layer in spec.kv_layers]
    try:
        for plan in plans:
            run(plan)
        return kv.meter.scales()
    finally:
        kv.meter, kv.cache = None, before
