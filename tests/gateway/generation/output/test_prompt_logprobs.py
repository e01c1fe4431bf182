"""Log-probabilities of prompts, joined from parts; and on real workers, together with those of the output."""

import pytest

from baton.gateway.core import TokenLogprob
from baton.gateway.generation.output.prompt_logprobs import PromptLogprobParts
from baton.rpc.errors import InternalError
from baton.v1 import types_pb2


def name(token_id, entry):
    return TokenLogprob(f"<{token_id}>", b"", token_id, entry.logprob, entry.rank, ())


def entries(*values):
    return [types_pb2.TokenLogprobs(logprob=value, rank=1) for value in values]


def test_parts_are_put_in_their_places_in_any_order_and_again():
    parts = PromptLogprobParts([5, 6, 7, 8], name)
    parts.take(3, entries(-3))
    parts.take(1, entries(-1, -2))
    parts.take(1, entries(-1))
    assert [(entry.token_id, entry.logprob) for entry in parts.complete()] == [(6, -1), (7, -2), (8, -3)]


def test_a_prompt_of_one_token_has_none():
    assert PromptLogprobParts([5], name).complete() == []


def test_missing_parts_are_the_workers_error():
    parts = PromptLogprobParts([5, 6, 7], name)
    parts.take(2, entries(-1))
    with pytest.raises(InternalError, match="for 1 prompt token"):
        parts.complete()


@pytest.mark.parametrize("first", [0, 2, 9])
def test_places_beyond_the_prompt_are_refused(first):
    with pytest.raises(InternalError, match="exceed the prompt"):
        PromptLogprobParts([5, 6, 7], name).take(first, entries(-1, -2))


def complete(stack, prompt, **fields):
    status, answer = stack.post("/v1/completions", {"prompt": prompt, "temperature": 0, **fields})
    assert status == 200, answer
    return answer["choices"][0]


def test_an_answer_scored_as_a_prompt_has_the_log_probabilities_it_was_drawn_with(tandem_stack):
    drawn = complete(tandem_stack, "Once upon a time", max_tokens=20, logprobs=1, return_token_ids=True)
    whole = [*drawn["prompt_token_ids"], *drawn["token_ids"]]
    for max_tokens in (0, 1):
        scored = complete(tandem_stack, whole, max_tokens=max_tokens, logprobs=1, echo=True)["logprobs"]
        assert len(scored["tokens"]) == len(whole) + max_tokens
        assert scored["token_logprobs"][0] is None
        mine = scored["token_logprobs"][len(drawn["prompt_token_ids"]) : len(whole)]
        assert mine == pytest.approx(drawn["logprobs"]["token_logprobs"], abs=1e-3)


def test_choices_share_the_prompt_computed_by_one(tandem_stack):
    status, answer = tandem_stack.post(
        "/v1/completions", {"prompt": "Once upon a time", "n": 2, "max_tokens": 2, "logprobs": 0, "echo": True}
    )
    assert status == 200, answer
    first, second = (choice["logprobs"]["token_logprobs"][:-2] for choice in answer["choices"])
    assert first == second
    assert len(first) == answer["usage"]["prompt_tokens"]


def test_a_simulated_worker_gives_some_too(start_stack):
    stack = start_stack(executor="sim", prefill_workers=0)
    status, answer = stack.post("/v1/completions", {"prompt": "Once", "prompt_logprobs": 1})
    assert status == 200, answer
    assert len(answer["choices"][0]["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
