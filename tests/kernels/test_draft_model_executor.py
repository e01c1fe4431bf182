"""A draft model of the CUDA executor, in Triton's interpreter: right drafts, and the tokens of a run without any."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.engine.interpreted_card import use_interpreted_card
from support.engine.tiny_models import VOCAB_SIZE, make_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from baton.worker.config import WorkerConfig
from baton.worker.core import Request, SamplingParams, StopConditions
from baton.worker.engine.engine import Engine
from baton.worker.executors.cuda.draft_model import CudaDraftModel
from baton.worker.executors.cuda.executor import CudaExecutor
from baton.worker.executors.factory import make_executor
from baton.worker.executors.ranks import RankGroup
from baton.worker.scheduling.settings import EngineSettings

pytestmark = pytest.mark.interpreted

SAMPLING = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.1, seed=2, logprobs=2),
    SamplingParams(temperature=0.9, top_p=0.8, seed=3),
]
COUNT = 10
ENDS = frozenset({19})  # a token of an answer, behind which guesses go on
Tokens = dict[str, list[int]]


def make_engine(folder: Path, speculation: str = "", num_blocks: int = 32) -> tuple[Engine, CudaExecutor]:
    config = WorkerConfig(
        model=str(folder),
        executor="cuda",
        dtype="float32",
        max_num_requests=len(SAMPLING),
        num_blocks=num_blocks,
        cuda_graphs=False,
        batch_invariant=True,
        speculative_config=speculation,
    )
    executor = make_executor(config)
    assert isinstance(executor, RankGroup)
    assert isinstance(executor.leader, CudaExecutor)
    return Engine(executor, EngineSettings(len(SAMPLING), 64, cache_outputs=False), epoch=1), executor.leader


def run(engine: Engine) -> Tokens:
    found: Tokens = {}
    counted = 0
    for index, sampling in enumerate(SAMPLING):
        prompt = [7, 8, 9, 10 + index] * (1 + 5 * index)
        engine.submit(
            Request(
                str(index), prompt, len(prompt), sampling, StopConditions(COUNT - index, stop_token_ids=ENDS), bytes(16)
            )
        )
        found[str(index)] = []
    while engine.has_work():
        outputs = engine.step()
        assert not outputs.failures, outputs.failures
        for request, token_id, _ in outputs.tokens():
            found[request.request_id].append(token_id)
        counted += sum(finish.num_draft_tokens for finish in outputs.finishes)
    engine.audit()
    assert counted == engine.counters().num_draft_tokens  # also if a step drafts behind the end of a request
    return found


def drafting(folder: Path, draft: Path, most: int = 3) -> tuple[Engine, CudaDraftModel]:
    settings = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": most}
    engine, executor = make_engine(folder, json.dumps(settings))
    assert executor.verified is not None
    speculator = executor.verified.speculator
    speculator.lengths.choose = lambda rows, available, least_gain=0.0: available  # type: ignore[method-assign]
    assert isinstance(speculator._proposer, CudaDraftModel)
    return engine, speculator._proposer


def test_a_model_agrees_with_itself_and_another_one_changes_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for name, folder in (("llama", one), ("qwen3", other)):
        make_model(name, folder)
        Tokenizer(WordLevel({str(number): number for number in range(VOCAB_SIZE)})).save(str(folder / "tokenizer.json"))
    use_interpreted_card(monkeypatch)
    plain = run(make_engine(one)[0])
    for draft in (one, other):
        engine, proposer = drafting(one, draft)
        assert run(engine) == plain
        counters = engine.counters()
        assert counters.num_draft_tokens > 12
        assert counters.num_proposer_failures == 0
        if draft == one:  # the filters of the last request are not its model's
            assert counters.num_accepted_tokens > 0.8 * counters.num_draft_tokens
        else:
            assert counters.num_accepted_tokens < counters.num_draft_tokens
        held = [block for blocks in proposer._steps._blocks.values() for block in blocks]  # of the last step's requests
        assert sorted(proposer._steps._free + held) == list(range(1, 32))
