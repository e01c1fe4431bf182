"""The sample model uses facts from thousands of tokens earlier."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from baton.worker.config import WorkerConfig
from baton.worker.core import Request, SamplingParams, StopConditions
from baton.worker.engine.engine import Engine
from baton.worker.executors.cpu.executor import CpuExecutor
from baton.worker.scheduling.settings import EngineSettings

MODEL = Path(__file__).resolve().parents[4] / "models" / "storyteller-7m"
BLOCK_SIZE = 16
SENTENCES = (
    "Tom went to the park with a red ball and met a dog.",
    "Lily saw a bird in the tree and it sang a song.",
    "The little boat went down the river to the sea.",
    "Ben and Anna made a cake and gave it to the queen.",
    "One day, a cat sat on the mat and looked at the moon.",
)


def prompt_of(statement: str, question: str, num_tokens: int, tokenizer: Tokenizer) -> list[int]:
    """The statement, stories, and the question `num_tokens` later."""
    rng = random.Random(0)
    pieces = [f"<|bos|><|im_start|>user\n{statement}"]
    used = 0
    while used < num_tokens:
        pieces.append(f" {rng.choice(SENTENCES)}")
        used += len(tokenizer.encode(pieces[-1], add_special_tokens=False).ids)
    pieces.append("<|im_end|>\n<|im_start|>assistant\nThank you.<|im_end|>\n")
    pieces.append(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")
    return tokenizer.encode("".join(pieces), add_special_tokens=False).ids


def answer(prompt: list[int], tokenizer: Tokenizer) -> str:
    config = WorkerConfig(
        model=str(MODEL), max_num_requests=1, block_size=BLOCK_SIZE, num_blocks=len(prompt) // BLOCK_SIZE + 8
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
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    prompt = prompt_of("My name is Rosie.", "What is my name?", num_tokens, tokenizer)
    assert len(prompt) > num_tokens
    assert answer(list(prompt), tokenizer) == "Your name is Rosie."
    if num_tokens < 6000:
        prompt = prompt_of("My name is Lars.", "What is my name?", num_tokens, tokenizer)
        assert answer(list(prompt), tokenizer) == "Your name is Lars."
