"""Architectures without a family run over Baton's cache, and have the tokens of Transformers' own `generate`."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.engine.tiny_models import generate_greedily, prompts
from support.engine.tiny_transformers_models import TRANSFORMERS_MODELS, save_tiny
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from baton.worker.config import WorkerConfig
from baton.worker.core import Request, SamplingParams, StopConditions
from baton.worker.engine.engine import Engine
from baton.worker.executors.cpu.executor import CpuExecutor
from baton.worker.models.supported.families import FAMILIES
from baton.worker.scheduling.settings import EngineSettings

GUIDE = Path(__file__).parents[4] / "docs" / "guides" / "models.md"
COUNT = 16
BLOCK_SIZE = 8
GREEDY = SamplingParams(temperature=0.0)


def make_engine(folder: Path, num_blocks: int) -> Engine:
    config = WorkerConfig(
        model=str(folder), threads=1, block_size=BLOCK_SIZE, num_blocks=num_blocks, max_num_requests=8
    )
    return Engine(CpuExecutor(config), EngineSettings(max_num_requests=8, max_num_batched_tokens=20), epoch=1)


def run(engine: Engine, some: list[list[int]]) -> list[list[int]]:
    """Submits a prompt every other step. Returns the outputs."""
    requests = [
        Request(str(index), list(prompt), len(prompt), GREEDY, StopConditions(max_tokens=COUNT), bytes(16))
        for index, prompt in enumerate(some)
    ]
    waiting, step = list(requests), 0
    while waiting or engine.has_work():
        if waiting and step % 2 == 0:
            engine.submit(waiting.pop(0))
        assert not engine.step().failures
        step += 1
    engine.audit()
    return [list(request.token_ids[request.num_prompt_tokens :]) for request in requests]


@pytest.mark.parametrize("model_type", TRANSFORMERS_MODELS)
def test_batches_chunks_prefix_hits_and_preemptions_equal_transformers(model_type: str, tmp_path: Path) -> None:
    model = save_tiny(tmp_path, model_type)
    shared = prompts(1, 1, seed=3)[0] * 3 + list(range(20, 50))
    some = [*prompts(3, 60, seed=2), [*shared, 5, 6], [*shared, 9], shared]
    engine = make_engine(tmp_path, num_blocks=15)
    if len(engine._executor.kv_spec.groups) > 1:  # requests hold less
        engine = make_engine(tmp_path, num_blocks=7)
    expected = [generate_greedily(model, prompt, COUNT) for prompt in some]
    assert run(engine, some) == expected
    counters = engine.counters()
    assert counters.num_preemptions > 0
    assert counters.num_cached_tokens >= BLOCK_SIZE
    assert len({token for output in expected for token in output}) >= 8, "the model says almost nothing"


def test_none_of_these_has_a_family_and_the_guide_lists_them() -> None:
    assert len(TRANSFORMERS_MODELS) >= 20
    architectures = {MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type] for model_type in TRANSFORMERS_MODELS}
    assert not architectures & FAMILIES.keys()
    guide = GUIDE.read_text()
    assert not [name for name in architectures if f"`{name}`" not in guide]
