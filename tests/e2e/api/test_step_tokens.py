"""Workers with several tokens per step behind a gateway: clients see no difference."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from support.processes.stack import MODEL_NAME, Stack, start_stack

_PROMPT = "Once upon a time there was a small boat."


@pytest.fixture(scope="module")
def stacks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stack, Stack]]:
    """One token a step, and several."""
    with ExitStack() as cleanup:
        folder = tmp_path_factory.mktemp("step-tokens")
        flags = [{"worker": ("--sim-slowness", "0.1", "--sim-step-tokens", width)} for width in ("1", "5")]
        made = [start_stack(folder, cleanup, extra, executor="sim", prefill_workers=0) for extra in flags]
        yield made[0], made[1]


def complete(stack: Stack, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL_NAME, "prompt": _PROMPT, "temperature": 0, **fields}
    status, answer = stack.post("/v1/completions", body)
    assert status == 200, answer
    return {"usage": answer["usage"], **answer["choices"][0]}


def num_steps(stack: Stack) -> int:
    (worker,) = stack.workers
    return stack.stats(worker).counters.num_steps


def test_an_answer_of_max_tokens_is_the_same_in_fewer_steps(stacks: tuple[Stack, Stack]) -> None:
    one, several = stacks
    before = num_steps(several)
    answers = [complete(stack, max_tokens=48, logprobs=2, ignore_eos=True) for stack in stacks]
    assert answers[0] == answers[1]
    assert answers[1]["finish_reason"] == "length"
    assert answers[1]["usage"]["completion_tokens"] == 48
    assert len(answers[1]["logprobs"]["token_logprobs"]) == 48
    assert num_steps(several) - before < 40
    assert complete(one, max_tokens=1, ignore_eos=True) == complete(several, max_tokens=1, ignore_eos=True)


@pytest.mark.parametrize("place", [5, 11, 12, 13, 30])
def test_a_stop_string_within_a_step_cuts_the_answer(stacks: tuple[Stack, Stack], place: int) -> None:
    whole = complete(stacks[0], max_tokens=64, ignore_eos=True)["text"]
    stop = whole[place : place + 3]
    answers = [complete(stack, max_tokens=64, stop=stop, ignore_eos=True) for stack in stacks]
    assert answers[0] == answers[1]
    assert answers[1]["text"] == whole[: whole.index(stop)]
    assert answers[1]["finish_reason"] == "stop"


def test_a_stop_token_within_a_step_cuts_the_answer(stacks: tuple[Stack, Stack]) -> None:
    seen = complete(stacks[0], max_tokens=64, ignore_eos=True, return_token_ids=True)["token_ids"]
    for place in (3, 4, 5, 20):
        stop = {"stop_token_ids": [seen[place]], "max_tokens": 64, "ignore_eos": True}
        answers = [complete(stack, **stop) for stack in stacks]
        assert answers[0] == answers[1]
        assert answers[1]["finish_reason"] == "stop"
        assert answers[1]["usage"]["completion_tokens"] == seen.index(seen[place]) + 1
    stacks[1].wait_all_blocks_back()


def test_a_streamed_chat_is_the_same_and_its_usage_too(stacks: tuple[Stack, Stack]) -> None:
    body = {
        "model": MODEL_NAME, "messages": [{"role": "user", "content": _PROMPT}], "temperature": 0, "max_tokens": 40,
        "n": 3, "stream_options": {"include_usage": True}, "ignore_eos": True,
    }  # fmt: skip
    seen = []
    for stack in stacks:
        texts, usage = ["", "", ""], None
        for chunk in stack.stream("/v1/chat/completions", body):
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["delta"].get("content") or ""
        seen.append((texts, usage))
    assert seen[0] == seen[1]
    assert seen[1][1]["completion_tokens"] == 120
