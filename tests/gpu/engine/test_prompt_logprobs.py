"""Log-probabilities of prompts, and wishes that depend on the output, on the GPU: Transformers' own, and the rules'."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from support.engine.engine_harness import make_request
from support.engine.gpu_engines import GREEDY, VOCAB_SIZE, engine_over, executor_for, generate, make_model, make_prompts
from transformers import PreTrainedModel

from baton.worker.core import ReasoningLimit, SamplingParams, TokenLogprobs
from baton.worker.executors.base import Executor
from baton.worker.sampling.output_rules import OutputRules

pytestmark = pytest.mark.gpu

LENGTHS = (2, 16, 17, 255, 256, 257, 300, 700, 1, 90)
CLOSE = 2e-3


@dataclass
class Subject:
    """One model in both worlds."""

    executor: Executor
    model: PreTrainedModel
    invariant: bool

    def expected(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Returns log-probabilities [len(token_ids), vocab_size] of the token after each token."""
        with torch.no_grad():
            logits = self.model(torch.tensor([token_ids], device="cuda")).logits[0]
        return logits.float().log_softmax(-1).cpu()


@pytest.fixture(scope="module", params=["graphs", "eager", "invariant"])
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    folder = tmp_path_factory.mktemp("prompt-logprobs")
    model = make_model("llama-128", folder)
    invariant = request.param == "invariant"
    executor = executor_for(folder, cuda_graphs=request.param != "eager", batch_invariant=invariant)
    yield Subject(executor, model, invariant)
    executor.close()


Found = dict[str, dict[int, TokenLogprobs]]


def score(executor: Executor, prompts: Sequence[Sequence[int]], num_tops: Sequence[int | None], budget: int) -> Found:
    """What each prompt got, by request and place."""
    engine = engine_over(executor, budget)
    found: Found = {}
    for index, (prompt, num_top) in enumerate(zip(prompts, num_tops, strict=True)):
        sampling = replace(GREEDY, prompt_logprobs=num_top)
        found[str(index)] = {}
        engine.submit(make_request(prompt, 3, request_id=str(index), sampling=sampling))
    while engine.has_work():
        outputs = engine.step()
        assert not outputs.failures
        for request, first, entries in outputs.prompt_logprobs:
            for place, entry in enumerate(entries, first):
                found[request.request_id][place] = entry
    engine.audit()
    return found


def check(found: dict[int, TokenLogprobs], prompt: Sequence[int], expected: torch.Tensor, num_top: int) -> None:
    assert sorted(found) == list(range(1, len(prompt)))
    for place, entry in found.items():
        row = expected[place - 1]
        own = row[prompt[place]].item()
        assert entry.logprob == pytest.approx(own, abs=CLOSE)
        # Ranks of tokens that lie as close as rounding may be either way.
        assert int((row > own + CLOSE).sum()) < entry.rank <= int((row > own - CLOSE).sum()) + 1
        assert len(entry.top_token_ids) == len(entry.top_logprobs) == num_top
        assert entry.top_logprobs == pytest.approx(row.topk(num_top).values.tolist(), abs=CLOSE)
        assert row[list(entry.top_token_ids)].tolist() == pytest.approx(entry.top_logprobs, abs=CLOSE)


@pytest.mark.parametrize("budget", [400, 61])
def test_they_are_transformers_own_in_chunks_of_any_size(subject: Subject, budget: int) -> None:
    prompts = make_prompts(LENGTHS)
    num_tops = [(0, 1, 5, 20)[index % 4] for index in range(len(prompts))]
    found = score(subject.executor, prompts, num_tops, budget)
    for index, (prompt, num_top) in enumerate(zip(prompts, num_tops, strict=True)):
        check(found[str(index)], prompt, subject.expected(prompt), num_top)


def test_only_requests_that_ask_get_logprobs_and_reused_rows_start_without(subject: Subject) -> None:
    prompts = make_prompts((30, 40, 50))
    asked = score(subject.executor, prompts, [2, 2, 2], 400)
    assert all(asked.values())
    silent = score(subject.executor, prompts, [None, None, None], 400)
    assert not any(silent.values())
    mixed = score(subject.executor, prompts, [None, 3, None], 400)
    assert [bool(mixed[name]) for name in "012"] == [False, True, False]
    check(mixed["1"], prompts[1], subject.expected(prompts[1]), 3)


def test_asking_changes_no_tokens(subject: Subject) -> None:
    prompts = make_prompts((33, 64, 129, 7))
    plain = [one.token_ids for one in generate(engine_over(subject.executor), prompts)]
    asking = replace(GREEDY, prompt_logprobs=4)
    scored = [one.token_ids for one in generate(engine_over(subject.executor), prompts, sampling=asking)]
    if subject.invariant:
        assert scored == plain
    else:
        same = sum(a == b for one, two in zip(plain, scored, strict=True) for a, b in zip(one, two, strict=True))
        assert same >= 0.9 * sum(map(len, plain))


def test_batch_invariant_ones_are_bit_equal_however_prompts_are_cut(subject: Subject) -> None:
    if not subject.invariant:
        pytest.skip("only batch_invariant promises it")
    prompts = make_prompts((300, 64, 129, 7))
    whole = score(subject.executor, prompts, [2] * 4, 400)
    cut = score(subject.executor, prompts, [2] * 4, 37)
    alone = score(subject.executor, prompts[:1], [2], 400)
    assert whole == cut
    assert alone["0"] == whole["0"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_outputs_keep_to_the_rules(subject: Subject, temperature: float) -> None:
    prompts = make_prompts((20, 40, 9))
    base = SamplingParams(temperature=temperature, seed=5)
    free = [one.token_ids for one in generate(engine_over(subject.executor), prompts, sampling=base)]
    rules = [
        replace(base, forbidden_sequences=(tuple(free[0][2:4]), tuple(free[0][8:12]), (free[0][5],), (1, 2, 3, 4))),
        replace(base, reasoning_limit=ReasoningLimit(6, (901, 902)), forbidden_sequences=((901,),)),
        base,
    ]
    bent = generate(engine_over(subject.executor), prompts, sampling=rules, stagger=2)
    for sampling, one in zip(rules, bent, strict=True):
        check_rules(sampling, one.token_ids)
    assert bent[1].token_ids[6:8] == [901, 902]


def check_rules(sampling: SamplingParams, output: Sequence[int]) -> None:
    for count, token_id in enumerate(output):
        known = OutputRules(sampling, output[:count])
        forced = known.forced()
        assert token_id == forced if forced is not None else token_id not in known.forbidden()


def test_asked_alternatives_are_the_models_own(subject: Subject) -> None:
    prompts = make_prompts((20, 40))
    ids = (7, VOCAB_SIZE - 1, 7, 12)
    asked = [replace(GREEDY, logprobs=0, logprob_token_ids=ids), replace(GREEDY, logprobs=2)]
    chosen, likely = generate(engine_over(subject.executor), prompts, count=6, sampling=asked)
    expected = subject.expected([*prompts[0], *chosen.token_ids])[len(prompts[0]) - 1 : -1]
    for row, token_id, entry in zip(expected, chosen.token_ids, chosen.logprobs, strict=True):
        assert entry.top_token_ids == ids
        assert entry.top_logprobs == pytest.approx(row[list(ids)].tolist(), abs=CLOSE)
        assert entry.logprob == pytest.approx(row[token_id].item(), abs=CLOSE)
    assert all(len(entry.top_token_ids) == 2 for entry in likely.logprobs)
