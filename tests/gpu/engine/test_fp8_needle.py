"""What lies anywhere in 128 k tokens is found in KV of 8 bits as in 16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.engine.gpu_engines import engine_over, executor_for, generate
from support.engine.needle import asked, haystack, write_needle_model
from support.engine.sample_context import MODEL, prompt_of, sample_tokenizer

pytestmark = pytest.mark.gpu

BLOCK_SIZE, BUDGET = 32, 8192
EIGHT_BITS = {"kv_cache_dtype": "fp8_e4m3"}


def answers(folder: Path, prompts: list[list[int]], count: int, **fields: Any) -> list[list[int]]:
    """Returns the tokens after each prompt. Later ones find the first one's prefix cached."""
    longest = max(map(len, prompts)) + count
    executor = executor_for(
        folder,
        dtype="bfloat16",
        block_size=BLOCK_SIZE,
        num_blocks=longest // BLOCK_SIZE + 80,
        max_num_batched_tokens=BUDGET,
        cuda_graphs=False,
        **fields,
    )
    engine = engine_over(executor, budget=BUDGET)
    found = [*generate(engine, prompts[:1], count), *generate(engine, prompts[1:], count)]
    return [one.token_ids for one in found]


@pytest.mark.parametrize("num_tokens", [8192, 131_072])
def test_every_pair_is_found_wherever_it_lies(num_tokens: int, tmp_path: Path) -> None:
    write_needle_model(tmp_path, num_tokens + 64)
    token_ids, questions = haystack(num_tokens, seed=0)
    prompts, expected = asked(questions, token_ids), [[one.answer] for one in questions]
    assert answers(tmp_path, prompts, 1) == expected
    assert answers(tmp_path, prompts, 1, **EIGHT_BITS) == expected
    assert answers(tmp_path, prompts, 1, **EIGHT_BITS, calculate_kv_scales=True) == expected


def test_the_sample_model_finds_a_name_as_in_16_bits() -> None:
    tokenizer = sample_tokenizer()
    prompts = [
        prompt_of(f"My name is {name}.", "What is my name?", 32_768, tokenizer) for name in ("Rosie", "Lars", "Anna")
    ]
    texts = [[tokenizer.decode(one) for one in answers(MODEL, prompts, 5, **fields)] for fields in ({}, EIGHT_BITS)]
    assert texts[0] == texts[1]
    assert "Rosie" in texts[1][0]
