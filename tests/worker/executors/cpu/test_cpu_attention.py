"""The CPU's attention of one layer: what it writes to the pool, and the queries that it returns."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from baton.kernels.reference.rope.rope_cache import rope_and_cache
from baton.worker.layers.cpu.attention import CpuAttention
from baton.worker.layers.cpu.kv import PagedKv
from baton.worker.layers.cpu.step import StepInputs
from baton.worker.layers.rope import cos_sin_table
from baton.worker.layers.rope_config import NO_ROPE, RopeConfig
from baton.worker.layers.spec import AttentionSpec
from baton.worker.quantization.neighbours import Norm

HEAD_DIM, BLOCK_SIZE = 8, 4
POSITIONS = torch.tensor([0, 3, 5])


def attention(rope: RopeConfig, norm: Norm | None = None) -> tuple[CpuAttention, Tensor]:
    spec = AttentionSpec(4, 2, HEAD_DIM, rope, 1.0)
    cache = torch.zeros(2, 2, 2, BLOCK_SIZE, HEAD_DIM)
    return CpuAttention(0, PagedKv([cache]), spec, cos_sin_table(rope, HEAD_DIM, 16), None, norm, norm, None), cache


def step() -> StepInputs:
    return StepInputs(POSITIONS, POSITIONS, [POSITIONS // BLOCK_SIZE], POSITIONS % BLOCK_SIZE, [], [])


@pytest.mark.parametrize("is_normed", [False, True])
@pytest.mark.parametrize("rope", [RopeConfig(NO_ROPE, 0.0), RopeConfig("default", 1e4)], ids=["none", "rope"])
def test_queries_keys_and_values_are_those_of_rope_and_cache(rope: RopeConfig, is_normed: bool) -> None:
    norm = Norm(torch.rand(HEAD_DIM), 1e-5) if is_normed else None
    ops, cache = attention(rope, norm)
    qkv = torch.randn(3, 8 * HEAD_DIM)
    expected, wanted = qkv.clone(), torch.zeros_like(cache)
    weight = None if norm is None else norm.weight
    table = cos_sin_table(rope, HEAD_DIM, 16)
    rope_and_cache(expected, wanted, POSITIONS, POSITIONS.int(), table, 4, q_norm=weight, k_norm=weight, eps=1e-5)
    queries = ops.write(qkv, step())
    assert torch.equal(queries, expected.view(3, 8, HEAD_DIM)[:, :4])
    assert torch.equal(cache, wanted)


def test_without_rope_the_projection_is_read_as_it_is() -> None:
    ops, _ = attention(RopeConfig(NO_ROPE, 0.0))
    qkv, inputs = torch.randn(3, 8 * HEAD_DIM), step()
    assert ops.write(qkv, inputs).data_ptr() == qkv.data_ptr()
    assert not inputs.rotations
