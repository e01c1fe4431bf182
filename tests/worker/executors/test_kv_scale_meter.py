"""Scales of quantized KV are powers of two with headroom, and need quantized KV."""

from __future__ import annotations

import pytest
import torch

from baton.rpc.errors import InvalidRequest
from baton.worker.config import WorkerConfig
from baton.worker.executors.kv_scales import scale_plans
from baton.worker.layers.kv_scale_meter import scales_for


def test_twice_the_largest_value_fits_and_no_more_than_four_times() -> None:
    largest = torch.tensor([1e-3, 0.7, 1.0, 111.9, 112.1, 300.0, 1e4])
    scales = scales_for(largest)
    assert torch.equal(torch.log2(scales), torch.log2(scales).round())
    assert (448 * scales >= 2 * largest).all()
    assert (448 * scales <= 4 * largest).all()


def test_nothing_and_infinity_are_not_scaled() -> None:
    assert scales_for(torch.tensor([0.0, float("inf"), float("nan")])).tolist() == [1.0, 1.0, 1.0]


def test_scales_are_computed_for_quantized_kv_alone() -> None:
    WorkerConfig(executor="cuda", kv_cache_dtype="fp8_e4m3", calculate_kv_scales=True).validate()
    with pytest.raises(InvalidRequest, match="needs kv_cache_dtype=fp8_e4m3") as refused:
        WorkerConfig(executor="cuda", calculate_kv_scales=True).validate()
    assert refused.value.field == "calculate_kv_scales"


def test_a_prompt_that_no_step_holds_is_refused() -> None:
    assert [plan.num_tokens for plan in scale_plans(100, 64, 16, 64)] == [64] * 4
    with pytest.raises(InvalidRequest, match="max_num_batched_tokens=64 must be at least 512") as refused:
        scale_plans(100, 4096, 16, 64)
    assert refused.value.field == "max_num_batched_tokens"
