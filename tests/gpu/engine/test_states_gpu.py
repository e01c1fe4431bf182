"""Models with states on a GPU: tokens of Transformers through preemptions, prefixes, host memory, and used blocks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.engine.gpu_engines import (
    check_greedy,
    engine_over,
    executor_for,
    generate,
    leader_of,
    make_model,
    make_prompts,
    tokens_of,
)
from support.engine.gpu_state_models import STATE_MODELS

pytestmark = pytest.mark.gpu

FP32_ROUNDING = 1e-4
BF16_ROUNDING = 0.06


@pytest.mark.parametrize("name", STATE_MODELS)
def test_preempted_and_continued_requests_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """In a pool that is too small for all; then the next turn of each, and one more of the last: it finds a state."""
    model = make_model(name, tmp_path)
    executor = executor_for(tmp_path)
    num_pages = sum(map(executor.kv_spec.pages_each, executor.kv_spec.groups)) - 1  # of a state
    executor.close()
    engine = engine_over(executor_for(tmp_path, num_blocks=30 + 6 * num_pages))
    prompts = make_prompts((60, 70, 80, 90, 100, 50), seed=7)
    found = tokens_of(generate(engine, prompts, 60))
    assert engine.counters().num_preemptions > 0
    assert check_greedy(model, prompts, found, FP32_ROUNDING) > 300
    turns = [[*prompt, *output] for prompt, output in zip(prompts, found, strict=True)]
    again = [tokens_of(generate(engine, [turn], 8))[0] for turn in turns]
    assert check_greedy(model, turns, again, FP32_ROUNDING) > 40
    last = [*turns[-1], *again[-1], 7]
    before = engine.counters().num_cached_tokens
    assert check_greedy(model, [last], tokens_of(generate(engine, [last], 8)), FP32_ROUNDING) > 5
    assert engine.counters().num_cached_tokens - before >= len(turns[-1]) // 16 * 16


@pytest.mark.parametrize("name", STATE_MODELS)
def test_what_blocks_held_before_is_in_no_token(name: str, tmp_path: Path) -> None:
    """In bfloat16, where the bits of an fp32 state may be NaN: memory is full of these, and blocks are used again."""
    model = make_model(name, tmp_path, torch.bfloat16)
    executor = executor_for(tmp_path, dtype="bfloat16", num_blocks=300)
    leader_of(executor)._paged.cache.view(torch.uint8).fill_(0xFF)
    engine = engine_over(executor)
    for seed in (0, 1):
        prompts = make_prompts(seed=seed)
        assert check_greedy(model, prompts, tokens_of(generate(engine, prompts)), BF16_ROUNDING) > 100
    executor.close()


def test_an_evicted_conversation_comes_back_from_host_memory(tmp_path: Path) -> None:
    model = make_model("qwen3_5_text-64", tmp_path)
    engine = engine_over(executor_for(tmp_path, num_blocks=150, host_cache_gb=0.5), min_host_hit_tokens=0)
    prompts = make_prompts((300, 250), seed=3)
    found = tokens_of(generate(engine, prompts))
    for seed in (4, 5, 6):
        generate(engine, make_prompts((500, 500), seed=seed), 2)
    turns = [[*prompt, *output] for prompt, output in zip(prompts, found, strict=True)]
    assert check_greedy(model, turns, tokens_of(generate(engine, turns, 8)), FP32_ROUNDING) > 10
    assert engine.counters().num_host_hit_tokens >= 500
