"""Models whose windows have block tables of their own: the tokens are those of Transformers, in fewer blocks."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.engine.tiny_models import generate_greedily, make_model, prompts
from transformers import PreTrainedModel

from baton.rpc.errors import InvalidRequest
from baton.worker.config import WorkerConfig
from baton.worker.core import FinishReason, Request, SamplingParams, StopConditions
from baton.worker.engine.engine import Engine
from baton.worker.executors.cpu.executor import CpuExecutor
from baton.worker.kv_spec import KvKind
from baton.worker.scheduling.settings import EngineSettings

COUNT, BLOCK_SIZE, ROWS = 20, 4, 8
Subject = tuple[Path, PreTrainedModel]


@pytest.fixture(scope="module", params=["gemma3_text", "gpt_oss", "cohere2"])
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, make_model(request.param, folder)


def make_executor(folder: Path, **values: object) -> CpuExecutor:
    defaults = {"threads": 1, "block_size": BLOCK_SIZE, "max_num_requests": ROWS, "transports": "none"}
    return CpuExecutor(WorkerConfig(model=str(folder), **{**defaults, **values}))  # type: ignore[arg-type]


def make_engine(folder: Path, num_blocks: int = 130, budget: int = 64, **values: object) -> Engine:
    executor = make_executor(folder, num_blocks=num_blocks, max_num_batched_tokens=budget, **values)
    full, *windows = executor.kv_spec.groups
    assert full.kind is KvKind.FULL
    assert {group.kind for group in windows} == {KvKind.WINDOW}
    settings = EngineSettings(max_num_requests=ROWS, max_num_batched_tokens=budget, min_host_hit_tokens=0)
    return Engine(executor, settings, epoch=1)


def run(engine: Engine, all_prompts: list[list[int]], count: int = COUNT, stagger: int = 0) -> list[list[int]]:
    """Runs requests, the next one every `stagger` steps; audits the pool after each step. Returns their outputs."""
    greedy = SamplingParams(temperature=0.0)
    requests = [
        Request(
            f"{engine.counters().num_finished}-{index}",
            list(prompt),
            len(prompt),
            greedy,
            StopConditions(count),
            bytes(16),
        )
        for index, prompt in enumerate(all_prompts)
    ]
    waiting, finished = list(requests), 0
    for step in range(10_000):
        if waiting and (not stagger or step % stagger == 0):
            now, waiting = (waiting, []) if not stagger else (waiting[:1], waiting[1:])
            for request in now:
                engine.submit(request)
        outputs = engine.step()
        assert not outputs.failures
        engine.audit()
        finished += len(outputs.finishes)
        assert all(finish.reason is FinishReason.LENGTH for finish in outputs.finishes)
        if finished == len(requests):
            return [list(request.token_ids[request.num_prompt_tokens :]) for request in requests]
    raise AssertionError("the engine does not finish")


def expected(model: PreTrainedModel, all_prompts: list[list[int]], count: int = COUNT) -> list[list[int]]:
    return [generate_greedily(model, prompt, count) for prompt in all_prompts]


def test_batches_in_chunks_equal_transformers(subject: Subject) -> None:
    folder, model = subject
    some = prompts(6, 60)
    assert run(make_engine(folder, budget=13), some, stagger=2) == expected(model, some)


def test_prefix_hits_equal_transformers(subject: Subject) -> None:
    """A prefix is found in all groups, also where the window of the request that computed it has passed its end."""
    folder, model = subject
    engine = make_engine(folder)
    shared = list(range(20, 57))
    first = [[*shared, *range(5, 30)]]
    assert run(engine, first) == expected(model, first)
    rest = [shared + tail for tail in ([], [9], [5, 6], [5, 6, 7])]
    assert run(engine, rest, stagger=2) == expected(model, rest)
    assert engine.counters().num_cached_tokens >= 4 * 36


def test_preempted_requests_equal_transformers(subject: Subject) -> None:
    folder, model = subject
    engine = make_engine(folder, num_blocks=18, budget=24)
    some = prompts(5, 40, seed=6)
    assert run(engine, some, count=40, stagger=3) == expected(model, some, 40)
    assert engine.counters().num_preemptions > 0


def test_prefixes_from_host_memory_equal_transformers(subject: Subject) -> None:
    """The pool holds one request, so the next ones evict its blocks; its prompt comes back from host memory."""
    folder, model = subject
    engine = make_engine(folder, num_blocks=20, budget=24, host_cache_gb=0.001)
    some = prompts(4, 50, seed=8)
    results = expected(model, some)
    assert [run(engine, [prompt])[0] for prompt in some] == results
    assert [run(engine, [prompt])[0] for prompt in some] == results
    assert engine.counters().num_host_hit_tokens > 0


@pytest.mark.parametrize("values", [{"transports": "auto"}, {"transports": "tcp"}, {"host_cache_gb": 0.001}])
def test_groups_are_the_same_wherever_kv_moves(subject: Subject, values: dict[str, object]) -> None:
    executor = make_executor(subject[0], num_blocks=16, **values)
    assert executor.kv_spec == make_executor(subject[0], num_blocks=16).kv_spec
    assert [group.kind for group in executor.kv_spec.groups] == [KvKind.FULL, KvKind.WINDOW, KvKind.WINDOW]


def test_blocks_of_all_layers_are_divided_among_the_groups(subject: Subject) -> None:
    executor = make_executor(subject[0], num_blocks=5)
    assert executor.num_blocks == 5 * len(executor.kv_spec.groups)
    assert executor.kv_spec.most_tokens(executor.num_blocks, 64) == 5 * BLOCK_SIZE


def test_a_memory_without_a_block_of_each_group_is_refused(subject: Subject) -> None:
    least = 3 * make_executor(subject[0], num_blocks=1).kv_spec.page_bytes
    with pytest.raises(InvalidRequest, match=f"it must be at least {least} bytes"):
        make_executor(subject[0], num_blocks=0, kv_cache_memory=least - 1)
    assert make_executor(subject[0], num_blocks=0, kv_cache_memory=least).num_blocks == 3
