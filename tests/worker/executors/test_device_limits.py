from __future__ import annotations

import pytest

from baton.worker.config import WorkerConfig
from baton.worker.executors.device_limits import Device, resolve_limits

H100 = Device("NVIDIA H100 80GB HBM3", 79 << 30)
A100 = Device("NVIDIA A100-SXM4-80GB", 79 << 30)
L4 = Device("NVIDIA L4", 22 << 30)


@pytest.mark.parametrize(
    ("device", "given", "limits"),
    [
        (None, {}, (256, 2048)),
        (L4, {}, (256, 2048)),
        (A100, {}, (256, 2048)),
        (H100, {}, (1024, 8192)),
        (H100, {"max_num_requests": 64}, (64, 8192)),
        (H100, {"max_num_batched_tokens": 512}, (512, 512)),
        (None, {"max_num_requests": 4096}, (4096, 4096)),
        (H100, {"max_num_requests": 8, "max_num_batched_tokens": 16}, (8, 16)),
    ],
)
def test_limits_that_are_not_set_are_the_devices(device, given, limits):
    config = resolve_limits(WorkerConfig(**given), device)
    config.validate()
    assert (config.max_num_requests, config.max_num_batched_tokens) == limits
