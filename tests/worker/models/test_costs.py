"""FLOPs of a step, against those that PyTorch counts while Transformers computes it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from support.engine.tiny_models import make_model
from torch.utils.flop_counter import FlopCounterMode

from baton.worker.models.costs import AttentionCost, ModelCosts, model_costs
from baton.worker.models.kv_groups import kv_spec_of
from baton.worker.weights.build import weight_bytes
from baton.worker.weights.loading import read_config


def costs_of(folder) -> ModelCosts:
    config = read_config(str(folder), "auto")
    size = weight_bytes(config, torch.float32)
    return model_costs(config, size, kv_spec_of(config, bytes(16), 4, "float32"))


def rows(*pairs: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    computed, scheduled = zip(*pairs, strict=True)
    return np.array(computed, np.int32), np.array(scheduled, np.int32)


@pytest.mark.parametrize(
    ("name", "length"),
    [
        *itertools.product(["llama", "qwen2", "gpt2", "gemma2", "qwen3_moe", "mixtral", "qwen2_moe"], [1, 8]),
        ("youtu", 8),  # Transformers makes keys and values for one token too, we do not
        ("deepseek_v2-lite", 8),
    ],
)
def test_the_flops_are_those_that_pytorch_counts(tmp_path, name, length):
    model = make_model(name, tmp_path)
    costs = costs_of(tmp_path)
    model.config._attn_implementation = model.config._experts_implementation = "eager"  # whose products are counted
    with torch.inference_mode(), FlopCounterMode(display=False) as counted:
        model(torch.arange(1, length + 1)[None], use_cache=False)
    cost = costs.of_step(*rows((0, length)), num_samples=length)
    # Transformers multiplies every query with every key, and masks the later ones.
    masked = sum(4 * one.num_layers * one.q_size for one in costs.attention) * length * (length - 1) // 2
    assert cost.flops + masked == pytest.approx(counted.get_total_flops(), rel=0.02)


def test_one_token_attends_to_latents(tmp_path):
    """Its queries have 40 values, its sums 32, in 4 heads of 3 layers."""
    make_model("youtu", tmp_path)
    costs = costs_of(tmp_path)
    few, many = (costs.of_step(*rows((computed, 1)), num_samples=1) for computed in (0, 100))
    assert many.flops - few.flops == 100 * 3 * 4 * 2 * (40 + 32)
    assert many.read_bytes - few.read_bytes == 100 * 3 * 40 * 4


def naive(computed: int, scheduled: int, window: int) -> tuple[int, int]:
    seen = [
        set(range(max(0, at - window + 1) if window else 0, at + 1)) for at in range(computed, computed + scheduled)
    ]
    return sum(map(len, seen)), len(set().union(*seen))


@pytest.mark.parametrize("window", [0, 1, 4, 9])
def test_attention_counts_the_keys_that_each_query_sees(window):
    costs = ModelCosts(0, 0, (AttentionCost(3, 10, window),), 0.0, (), 2.0)
    for computed in range(12):
        for scheduled in range(1, 12):
            pairs, keys = naive(computed, scheduled, window)
            cost = costs.of_step(*rows((computed, scheduled)), 0)
            assert cost == (4 * 3 * 10 * pairs, 3 * 2.0 * keys, 3 * 2.0 * scheduled)


def test_a_step_reads_the_weights_once_and_writes_its_own_kv(tmp_path):
    make_model("llama", tmp_path)
    config = read_config(str(tmp_path), "auto")
    costs = costs_of(tmp_path)
    one, many = costs.of_step(*rows((0, 1)), 1), costs.of_step(*rows(*[(0, 1)] * 100), 100)
    kv_bytes = 2 * config.num_kv_heads * config.head_dim * 4 * config.num_layers
    assert one.written_bytes == kv_bytes
    assert many.written_bytes == 100 * kv_bytes
    assert many.read_bytes - one.read_bytes == pytest.approx(99 * kv_bytes)
    embedding = 0 if config.tie_embeddings else 4 * config.vocab_size * config.hidden_size
    assert one.read_bytes == pytest.approx(weight_bytes(config, torch.float32) - embedding + kv_bytes, rel=0.02)


def test_few_tokens_touch_few_experts(tmp_path):
    make_model("qwen3_moe", tmp_path)
    costs = costs_of(tmp_path)
    reads = [costs.of_step(*rows(*[(0, 1)] * count), 0).read_bytes for count in (1, 4, 1000)]
    assert reads[0] < reads[1] < reads[2]
    assert costs.experts[0].num_bytes > 0
