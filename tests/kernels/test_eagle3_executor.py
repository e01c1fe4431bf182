"""An EAGLE-3 head of the CUDA executor, in Triton's interpreter: the formula's guesses, and no other tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.engine.answer_proposer import verify_always
from support.engine.eagle3_heads import PlainHead, write_head
from support.engine.interpreted_card import use_interpreted_card
from support.engine.tiny_models import VOCAB_SIZE, make_model
from support.engine.watched_proposer import watched
from transformers import AutoModelForCausalLM

from baton.rpc.errors import Unsupported
from baton.worker.config import WorkerConfig
from baton.worker.core import Request, SamplingParams, StopConditions
from baton.worker.engine.engine import Engine
from baton.worker.executors.cuda.eagle3 import CudaEagle3
from baton.worker.executors.cuda.executor import CudaExecutor
from baton.worker.executors.factory import make_executor
from baton.worker.executors.ranks import RankGroup
from baton.worker.scheduling.settings import EngineSettings

pytestmark = pytest.mark.interpreted

ROWS = 3
COUNT = 12
MOST = 3


def make_engine(folder: Path, speculation: str = "", num_blocks: int = 40) -> tuple[Engine, CudaExecutor]:
    config = WorkerConfig(
        model=str(folder),
        executor="cuda",
        dtype="float32",
        max_num_requests=ROWS,
        num_blocks=num_blocks,
        cuda_graphs=False,
        batch_invariant=True,
        speculative_config=speculation,
    )
    executor = make_executor(config)
    assert isinstance(executor, RankGroup)
    assert isinstance(executor.leader, CudaExecutor)
    return Engine(executor, EngineSettings(ROWS, 24, cache_outputs=False), epoch=1), executor.leader


def run(engine: Engine, samplings: list[SamplingParams], name: str = "") -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for index, sampling in enumerate(samplings):
        prompt = [7, 8, 9, 10 + index] * (1 + 4 * index)
        stop = StopConditions(COUNT - index)
        engine.submit(Request(f"{name}{index}", prompt, len(prompt), sampling, stop, bytes(16)))
        found[f"{name}{index}"] = []
    while engine.has_work():
        outputs = engine.step()
        assert not outputs.failures, outputs.failures
        for request, token_id, _ in outputs.tokens():
            found[request.request_id].append(token_id)
    engine.audit()
    return found


def drafting(folder: Path, head: Path) -> tuple[Engine, CudaEagle3]:
    settings = {"method": "eagle3", "model": str(head), "num_speculative_tokens": MOST}
    engine, executor = make_engine(folder, json.dumps(settings))
    assert executor.verified is not None
    verify_always(executor.verified)
    proposer = executor.verified.speculator._proposer
    assert isinstance(proposer, CudaEagle3)
    return engine, proposer


def write_both(folder: Path, *, normed: bool = False) -> tuple[Path, Path, tuple[int, ...]]:
    """Returns the folders of a model and a head, and the layers that the head reads."""
    model = make_model("llama", folder / "model")
    layers = (0, 1, model.config.num_hidden_layers - 1)
    changes = {"eagle_aux_hidden_state_layer_ids": list(layers), "norm_before_residual": normed}
    write_head(folder / "head", VOCAB_SIZE, changes, hidden=model.config.hidden_size)
    return folder / "model", folder / "head", layers


@pytest.mark.parametrize("normed", [False, True])
def test_guesses_are_those_of_the_formula(normed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, head, layers = write_both(tmp_path, normed=normed)
    use_interpreted_card(monkeypatch)
    engine, proposer = drafting(folder, head)
    seen = watched(proposer)
    run(engine, [SamplingParams(temperature=0.0)] * ROWS)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    plain = PlainHead(head, model, layers, residual_is_normed=normed)
    guesses = [(text, guess) for text, guess in seen if guess]
    assert len(guesses) > 10
    for text, guess in guesses:
        assert guess == plain.guess(text, len(guess))
    if normed:
        return
    seen.clear()
    before = engine.counters().num_cached_tokens
    run(engine, [SamplingParams(temperature=0.0)] * ROWS, "again")
    assert engine.counters().num_cached_tokens - before == 48  # of prompts of 4, 20 and 36 tokens
    again = [(text, guess) for text, guess in seen if guess]
    assert any(text[3] == 12 for text, _ in again)  # of the third prompt
    for text, guess in again:
        assert guess == plain.guess(text, len(guess), {10: 0, 11: 16, 12: 32}[text[3]])


def test_its_drafts_change_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, head, _ = write_both(tmp_path)
    use_interpreted_card(monkeypatch)
    mixed = [SamplingParams(temperature=5.0, seed=index, logprobs=index) for index in range(ROWS)]
    engine, proposer = drafting(folder, head)
    assert run(engine, mixed) == run(make_engine(folder)[0], mixed)
    counters = engine.counters()
    assert 0 < counters.num_accepted_tokens < counters.num_draft_tokens
    assert counters.num_proposer_failures == 0
    steps = proposer._steps
    held = [block for blocks in steps._blocks.values() for block in blocks]
    assert sorted(steps._free + held) == list(range(1, 40))


def test_layers_of_the_checkpoint_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model("llama", tmp_path)
    use_interpreted_card(monkeypatch)
    with pytest.raises(Unsupported, match="method 'mtp' has no form on executor=cuda; give eagle3, draft_model"):
        make_engine(tmp_path, json.dumps({"method": "mtp"}))
