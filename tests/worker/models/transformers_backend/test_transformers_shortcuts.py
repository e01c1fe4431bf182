"""On a CPU, linears of any size take the device's ops."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from baton.worker.layers.cpu.device import CpuDevice
from baton.worker.layers.cpu.kv import PagedKv
from baton.worker.models.transformers_backend.attention import RunningStep
from baton.worker.models.transformers_backend.shortcuts import shorten


def test_a_head_of_any_vocabulary_takes_the_ops_of_the_cpu() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 50_257 // 8, bias=False), nn.Linear(50_257 // 8, 48))
    device = CpuDevice(PagedKv([torch.zeros(1)]), {})
    x = torch.randn(1, 3, 64)

    with torch.inference_mode():
        shorten(module, device, RunningStep())

        expected = x
        for part in module:
            assert "forward" in vars(part), "the linear is computed by Transformers"
            expected = functional.linear(expected, part.weight, part.bias)
        torch.testing.assert_close(module(x), expected, rtol=1e-4, atol=1e-4)
