"""The sample model uses facts from thousands of tokens earlier."""

from __future__ import annotations

import pytest
from support.engine.sample_context import MODEL, prompt_of, sample_tokenizer
from tokenizers import Tokenizer

from baton.worker.config import WorkerConfig
from baton.worker.core import Request, SamplingParams, StopConditions
from baton.worker.engine.engine import Engine
from baton.worker.executors.cpu.executor import CpuExecutor
from baton.worker.scheduling.settings import EngineSettings

BLOCK_SIZE = 16


def answer(prompt: list[int], tokenizer: Tokenizer, kv_cache_dtype: str = "auto") -> str:
    config = WorkerConfig(
        model=str(MODEL),
        max_num_requests=1,
        block_size=BLOCK_SIZE,
        num_blocks=len(prompt) // BLOCK_SIZE + 8,
        kv_cache_dtype=kv_cache_dtype,
    )
    engine = Engine(CpuExecutor(config), EngineSettings(max_num_requests=1, max_num_batched_tokens=2048), epoch=1)
    stop = StopConditions(max_tokens=16, eos_token_ids=frozenset((4, 2)))
    request = Request("one", prompt, len(prompt), SamplingParams(temperature=0.0), stop, bytes(16))
    engine.submit(request)
    while engine.has_work():
        assert not engine.step().failures
    return tokenizer.decode(request.token_ids[request.num_prompt_tokens :])


@pytest.mark.parametrize(
    "num_tokens", [1000, 6000, pytest.param(32_768, marks=[pytest.mark.long, pytest.mark.timeout(1200)])]
)
def test_a_name_from_the_start_is_found(num_tokens: int) -> None:
    tokenizer = sample_tokenizer()
    prompt = prompt_of("My name is Rosie.", "What is my name?", num_tokens, tokenizer)
    assert len(prompt) > num_tokens
    assert answer(list(prompt), tokenizer) == "Your name is Rosie."
    if num_tokens < 6000:
        prompt = prompt_of("My name is Lars.", "What is my name?", num_tokens, tokenizer)
        assert answer(list(prompt), tokenizer) == "Your name is Lars."


@pytest.mark.parametrize(
    "num_tokens", [1000, pytest.param(32_768, marks=[pytest.mark.long, pytest.mark.timeout(1200)])]
)
def test_a_name_is_found_in_kv_of_8_bits(num_tokens: int) -> None:
    tokenizer = sample_tokenizer()
    for name in ("Rosie", "Lars"):
        prompt = prompt_of(f"My name is {name}.", "What is my name?", num_tokens, tokenizer)
        assert answer(prompt, tokenizer, "fp8_e4m3") == f"Your name is {name}."
