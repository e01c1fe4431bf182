"""Guesses change no bit of models with states: a wrong one leaves the state after the last right token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.engine.answer_proposer import answers_of, draft_from
from support.engine.spec_runs import VOCAB_SIZE, constrained, make_engine, make_executor, random_requests, run
from support.engine.spec_runs import new_grammars as grammars_of
from support.engine.tiny_state_models import STATE_MODELS

from baton.worker.core import Request
from baton.worker.executors.cpu.executor import CpuExecutor

ROOMY = 900


def requests_of(count: int, seed: int) -> list[Request]:
    requests = random_requests(count, seed)
    for index, request in enumerate(requests):
        if index % 8 == 5:
            constrained(request, index)
    return requests


@pytest.fixture(scope="module", params=sorted(STATE_MODELS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of this shape, with as many tokens as the sample model."""
    torch.manual_seed(5)
    small = STATE_MODELS[request.param]()
    config = small.config
    config.vocab_size = VOCAB_SIZE
    made = type(small)(config)
    same = {name: one for name, one in small.state_dict().items() if one.shape == made.state_dict()[name].shape}
    made.load_state_dict(same, strict=False)
    folder = tmp_path_factory.mktemp("states") / str(request.param)
    made.save_pretrained(folder)
    return folder


def scarce(executor: CpuExecutor) -> int:
    """Returns the blocks that preempt requests whose states take so many."""
    return 20 + 4 * executor.kv_spec.pages_each(executor.kv_spec.groups[-1])


def test_right_and_wrong_guesses_change_no_bit(model: Path) -> None:
    executor = make_executor(model=model, num_blocks=ROOMY)
    plain = run(make_engine(executor, grammars=grammars_of(executor)), requests_of(24, seed=1))
    answered = requests_of(24, seed=1)
    for request in answered:
        request.token_ids.generated.extend(token_id for token_id, _ in plain[request.request_id].tokens)
    for mistakes, most, num_blocks in ((0.3, 9, ROOMY), (0.1, 6, scarce(executor))):
        guessing = make_executor("ngram", most, num_blocks, model=model)
        speculator = guessing._drafts._speculator
        assert speculator is not None
        draft_from(speculator, answers_of(answered), mistakes, VOCAB_SIZE)
        engine = make_engine(guessing, 200, grammars_of(guessing))
        assert run(engine, requests_of(24, seed=1), seed=9) == plain
        counters = engine.counters()
        assert counters.num_output_tokens // 4 < counters.num_accepted_tokens < counters.num_draft_tokens
        assert (counters.num_preemptions > 0) is (num_blocks != ROOMY)
