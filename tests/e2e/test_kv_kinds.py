"""Models with states, latents and windows through gateway, router and workers: their answers are Transformers'.

Prompts are computed by a prefill worker and continued by one of two decode workers, which dies in the middle of an
answer.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

import pytest
import torch
from support.engine.tiny_models import generate_greedily, make_model
from support.engine.tiny_shape import VOCAB_SIZE
from support.processes.stack import Service, Stack, metric, start_stack, wait_until
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel

pytestmark = pytest.mark.timeout(400)

NAME = "tiny"
COUNT = 24
LENGTHS = (31, 64, 150, 230)
WORKER_FLAGS = ("--threads", "1", "--block-size", "16", "--num-blocks", "400", "--verify-transfers")
_salts = itertools.count(1)


@dataclass(frozen=True)
class Fleet:
    """Running services, and their model in Transformers. Texts are the numbers of their tokens."""

    stack: Stack
    model: PreTrainedModel

    @property
    def decodes(self) -> list[Service]:
        return [worker for worker in self.stack.workers if "decode" in worker.plan.name]

    def expected(self, prompt: list[int], count: int = COUNT) -> list[int]:
        return generate_greedily(self.model, prompt, count)

    def answer(self, prompt: list[int]) -> list[int]:
        status, answer = self.stack.post("/v1/completions", body(prompt, COUNT))
        assert status == 200, answer
        return [int(word) for word in answer["choices"][0]["text"].split()]

    def num_transfers(self) -> int:
        return sum(self.stack.stats(worker).counters.num_transfers for worker in self.decodes)


def body(prompt: list[int], count: int) -> dict[str, object]:
    return {"model": NAME, "prompt": prompt, "temperature": 0, "max_tokens": count, "ignore_eos": True}


def new_prompt(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(next(_salts))
    return torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()


@pytest.fixture(scope="module", params=["qwen3_next", "granitemoehybrid-mamba", "deepseek_v3", "gemma3_text"])
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp(request.param)
    model = make_model(request.param, folder)
    words = {str(number): number for number in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    with ExitStack() as cleanup:
        (folder / "logs").mkdir()
        stack = start_stack(
            folder / "logs",
            cleanup,
            {"worker": WORKER_FLAGS},
            model=str(folder),
            served_model_name=(NAME,),
            prefill_workers=1,
            decode_workers=2,
        )
        yield Fleet(stack, model)


def test_handed_over_answers_are_those_of_transformers(fleet: Fleet) -> None:
    """All at once, again and as the next turn, until some prompts were handed over."""

    def some_are_handed_over() -> bool:
        prompts = [new_prompt(length) for length in LENGTHS]
        with ThreadPoolExecutor(len(prompts)) as threads:
            for _ in range(2):
                answers = list(threads.map(fleet.answer, prompts))
                assert answers == [fleet.expected(prompt) for prompt in prompts]
                prompts = [[*prompt, *answer, 7, 8] for prompt, answer in zip(prompts, answers, strict=True)]
        return fleet.num_transfers() > 0

    wait_until(some_are_handed_over, "a prompt comes from the prefill worker", 120)
    fleet.stack.wait_all_blocks_back()
    for worker in fleet.stack.workers:
        counters = fleet.stack.stats(worker).counters
        assert (counters.num_failed_transfers, counters.num_checksum_errors) == (0, 0)
        assert (counters.transfers.num_stranded_blocks, counters.transfers.num_mismatches) == (0, 0)


def test_an_answer_outlives_its_decode_worker(fleet: Fleet) -> None:
    """Killed after some tokens of it; the other worker continues the stream."""
    prompt, count = new_prompt(70), 400
    text, busy = "", None
    for number, chunk in enumerate(fleet.stack.stream("/v1/completions", body(prompt, count))):
        text += "".join(choice["text"] for choice in chunk["choices"])
        if number == 5:
            (busy,) = [worker for worker in fleet.decodes if fleet.stack.stats(worker).num_held_blocks > 0]
            busy.kill()
    assert busy is not None
    assert list(map(int, text.split())) == fleet.expected(prompt, count)
    _, metrics = fleet.stack.get("/metrics")
    assert metric(metrics, "baton_gateway_failovers_total") > 0
    assert metric(metrics, "baton_gateway_poisonous_requests_total") == 0
    busy.process.wait(20)
    busy.start()
    fleet.stack.wait_all_blocks_back()
