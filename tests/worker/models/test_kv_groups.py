"""Groups of layers with windows: blocks of all groups have one size, and a request holds little more than it needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from support.engine.engine_harness import make_request

from baton.worker.kv_spec import KvKind, KvSpec
from baton.worker.models.config import ModelConfig
from baton.worker.models.kv_groups import window_spec_of
from baton.worker.models.presets import PRESETS
from baton.worker.models.registry import parse_config
from baton.worker.requests.outputs import EngineCounters
from baton.worker.requests.state import RequestState
from baton.worker.scheduling.scheduler import Scheduler
from baton.worker.scheduling.settings import EngineSettings

BLOCK_SIZE, NUM_TOKENS, BUDGET = 16, 8192, 2048


def gemma3(num_layers: int, window: int, pattern: int = 6) -> Mapping[str, Any]:
    """Returns the parts of a Gemma 3 that its KV depends on."""
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "vocab_size": 262144,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "sliding_window": window,
        "sliding_window_pattern": pattern,
        "max_position_embeddings": 131072,
    }


SHAPES: Mapping[str, Mapping[str, Any]] = {
    "gpt-oss-20b": PRESETS["gpt-oss-20b"],
    "gemma-3-12b": gemma3(48, 1024),
    "gemma-3-4b": gemma3(34, 1024),
    "gemma-3-1b": gemma3(26, 512),
}


def spec_of(values: Mapping[str, Any]) -> tuple[ModelConfig, KvSpec]:
    config = parse_config(values, "config.json")
    return config, window_spec_of(config, bytes(16), BLOCK_SIZE, "bfloat16")


@pytest.mark.parametrize(
    ("shape", "num_layers"),
    [
        ("gpt-oss-20b", [12, 12]),
        ("gemma-3-12b", [8, 8, 8, 8, 8, 8]),
        ("gemma-3-4b", [5, 4, 5, 5, 5, 5, 5]),
        ("gemma-3-1b", [4, 3, 4, 4, 3, 4, 4]),
    ],
)
def test_every_layer_is_in_a_group_of_about_as_many(shape: str, num_layers: list[int]) -> None:
    config, spec = spec_of(SHAPES[shape])
    assert [group.num_layers for group in spec.groups] == num_layers
    assert [group.kind for group in spec.groups] == [KvKind.FULL] + [KvKind.WINDOW] * (len(num_layers) - 1)
    windows = {layer: group.window for group in spec.groups for layer in group.layers}
    assert [windows[layer] for layer in range(config.num_layers)] == list(config.windows)
    assert [spec.groups[group].window for group in spec.layer_groups] == list(config.windows)


@pytest.mark.parametrize(
    "values",
    [
        PRESETS["llama-3.1-8b"],
        gemma3(8, 1024, pattern=1),  # no layer has a window
        gemma3(8, 200_000),  # windows are longer than the context
        gemma3(8, 1024, pattern=100),  # all layers have one
    ],
    ids=["llama", "none", "long", "all"],
)
def test_one_full_group_where_windows_save_nothing(values: Mapping[str, Any]) -> None:
    _, spec = spec_of(values)
    assert [group.kind for group in spec.groups] == [KvKind.FULL]


@pytest.mark.parametrize(
    ("shape", "least"), [("gpt-oss-20b", 0.99), ("gemma-3-12b", 0.99), ("gemma-3-4b", 0.97), ("gemma-3-1b", 0.96)]
)
def test_requests_of_8k_tokens_take_little_more_than_an_ideal_packing(shape: str, least: float) -> None:
    """The ideal keeps, in each layer, the keys and values that the next token reads, and nothing else."""
    config, spec = spec_of(SHAPES[shape])
    settings = EngineSettings(max_num_requests=8, max_num_batched_tokens=BUDGET)
    num_blocks = 8 * spec.most_blocks(NUM_TOKENS + BLOCK_SIZE, BUDGET)
    scheduler = Scheduler(num_blocks, BLOCK_SIZE, 2 * NUM_TOKENS, settings, EngineCounters(), lambda: 0.0, kv_spec=spec)
    states: list[RequestState] = []
    for number in range(4):
        prompt = [number] * (NUM_TOKENS - 3 * BLOCK_SIZE)
        state = RequestState(make_request(prompt, 200), (0, 0.0, number), 2 * NUM_TOKENS, frozenset(), 0.0)
        state.hash_up_to(len(prompt), BLOCK_SIZE)
        scheduler.place(state)
        states.append(state)
    while min(len(state.token_ids) for state in states) < NUM_TOKENS:
        scheduled = scheduler.schedule()
        assert scheduled is not None
        scheduler.collected(scheduled.plan.step)
        scheduler.commit(scheduled)
        for state, sampled in zip(scheduled.states, scheduled.plan.samples, strict=True):
            if sampled:
                state.token_ids.append(number)
    scheduler.check_integrity(states)
    token_bytes = spec.layer_bytes(0) // BLOCK_SIZE
    ideal = sum(
        min(window or len(state.token_ids), len(state.token_ids)) * token_bytes
        for state in states
        for window in config.windows
    )
    held = scheduler.pool.count().num_held_blocks * spec.page_bytes
    assert ideal / held >= least
    assert held < 0.75 * sum(len(state.token_ids) for state in states) * token_bytes * config.num_layers


def test_the_longest_request_fills_the_pool() -> None:
    """Capacity counts the blocks of all groups, with a whole step ahead of a window."""
    _, spec = spec_of(SHAPES["gemma-3-12b"])
    for num_blocks in (1, 5, 6, 300, 10_000, 1 << 70):
        longest = spec.most_tokens(num_blocks, BUDGET)
        assert spec.most_blocks(longest, BUDGET) <= num_blocks < spec.most_blocks(longest + 1, BUDGET)
