"""The engine over the CPU executor: whatever the scheduler does, the tokens are those of Transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.engine.tiny_models import MODELS, generate_greedily, load_transformers, make_model, prompts
from transformers import PreTrainedModel

from baton.worker.config import WorkerConfig
from baton.worker.core import FinishReason, Request, SamplingParams, StopConditions
from baton.worker.engine.engine import Engine
from baton.worker.executors.cpu.executor import CpuExecutor
from baton.worker.kv_spec import KvKind
from baton.worker.scheduling.settings import EngineSettings

SAMPLE_MODEL = Path(__file__).resolve().parents[4] / "models" / "storyteller-7m"
COUNT = 20
BLOCK_SIZE = 8
GREEDY = SamplingParams(temperature=0.0)


# One for each kind of layer that steps meet; test_cpu_executor.py has chunks, batches and prefix hits of all.
KINDS = (
    "llama3-rope",
    "mistral-window",
    "gemma3_text",
    "gpt2",
    "phi3-long",
    "mixtral",
    "gpt_oss",
    "deepseek_v2",
    "qwen3_next",
    "granitemoehybrid-mamba",
    "granitemoehybrid-experts",
    "nemotron_h",
    "nemotron_h-experts",
    "kimi_linear",
    "storyteller-7m",
)
FAMILIES = (
    *KINDS,
    *("qwen2", "qwen3", "phi3", "granite", "olmo2"),
    *("qwen3_moe", "qwen2_moe", "olmoe", "granitemoe", "glm4_moe", "ernie4_5_moe", "minimax_m2", "phimoe"),
    *("smollm3", "glm", "glm4", "granitemoehybrid", "olmo", "olmo3", "cohere-normed", "cohere2"),
    *(
        "gemma",
        "gemma2",
        "gpt_neox",
        "starcoder2",
        "ministral",
        "ministral3",
        "deepseek_v3",
        "qwen3_5",
        "lfm2",
        "lfm2-biased",
    ),
    *("glm4_moe_lite", "youtu", "minicpm3"),
)
of_each_kind = pytest.mark.parametrize("subject", KINDS, indirect=True)


@pytest.fixture(scope="module", params=FAMILIES)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    if request.param in MODELS:
        folder = tmp_path_factory.mktemp(request.param)
        return folder, make_model(request.param, folder)
    return SAMPLE_MODEL, load_transformers(SAMPLE_MODEL)


def make_engine(
    folder: Path, num_blocks: int = 200, budget: int = 512, rows: int = 16, host_cache_gb: float = 0.0
) -> Engine:
    config = WorkerConfig(
        model=str(folder),
        threads=1,
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        max_num_requests=rows,
        host_cache_gb=host_cache_gb,
    )
    settings = EngineSettings(max_num_requests=rows, max_num_batched_tokens=budget, min_host_hit_tokens=0)
    return Engine(CpuExecutor(config), settings, epoch=1)


def state_pages(folder: Path) -> int:
    """Returns the pages of the states of one request."""
    spec = CpuExecutor(WorkerConfig(model=str(folder), threads=1, block_size=BLOCK_SIZE, num_blocks=200)).kv_spec
    return 2 * sum(spec.pages_each(group) for group in spec.groups if group.kind is KvKind.STATE)


def make_request(name: str, prompt: list[int], count: int = COUNT, sampling: SamplingParams = GREEDY) -> Request:
    return Request(name, list(prompt), len(prompt), sampling, StopConditions(max_tokens=count), bytes(16))


def run(engine: Engine, requests: list[Request], stagger: int = 0) -> None:
    """Submits a request every `stagger` steps and steps until nothing is left."""
    waiting = list(requests)
    finished = 0
    for step in range(10_000):
        if waiting and (stagger == 0 or step % stagger == 0):
            for request in waiting if stagger == 0 else waiting[:1]:
                engine.submit(request)
            waiting = [] if stagger == 0 else waiting[1:]
        outputs = engine.step()
        assert not outputs.failures
        finished += len(outputs.finishes)
        assert all(finish.reason is FinishReason.LENGTH for finish in outputs.finishes)
        if finished == len(requests):
            engine.audit()
            return
    raise AssertionError("the engine does not finish")


def check(model: PreTrainedModel, requests: list[Request]) -> None:
    for request in requests:
        prompt = request.token_ids[: request.num_prompt_tokens]
        count = request.stop.max_tokens
        assert request.token_ids[request.num_prompt_tokens :] == generate_greedily(model, prompt, count)


@of_each_kind
def test_a_burst_in_small_chunks_equals_transformers(subject: tuple[Path, PreTrainedModel]) -> None:
    folder, model = subject
    requests = [make_request(str(index), prompt) for index, prompt in enumerate(prompts(7, 60))]
    run(make_engine(folder, budget=20), requests)
    check(model, requests)


@of_each_kind
def test_prefix_hits_equal_transformers(subject: tuple[Path, PreTrainedModel]) -> None:
    folder, model = subject
    engine = make_engine(folder)
    shared = list(range(20, 57))
    first = [make_request("first", [*shared, 5, 6])]
    run(engine, first)
    rest = [make_request(str(index), shared + tail) for index, tail in enumerate(([], [9], [5, 6], [5, 6, 7]))]
    run(engine, rest, stagger=2)
    assert engine.counters().num_cached_tokens >= 4 * 32
    check(model, first + rest)


def test_preempted_requests_equal_transformers(subject: tuple[Path, PreTrainedModel]) -> None:
    folder, model = subject
    engine = make_engine(folder, num_blocks=14 + state_pages(folder), budget=24)
    requests = [make_request(str(index), prompt, 40) for index, prompt in enumerate(prompts(5, 40, seed=6))]
    run(engine, requests, stagger=3)
    assert engine.counters().num_preemptions > 0
    check(model, requests)


@of_each_kind
def test_prefixes_from_host_memory_equal_transformers(subject: tuple[Path, PreTrainedModel]) -> None:
    """Other prompts evict a conversation's blocks, and its state; its next turn finds them in host memory."""
    folder, model = subject
    engine = make_engine(folder, num_blocks=16 + state_pages(folder), budget=24, host_cache_gb=0.02)
    first = make_request("first", list(range(20, 63)))
    others = [make_request(str(index), prompt) for index, prompt in enumerate(prompts(3, 60, seed=9))]
    for request in (first, *others):
        run(engine, [request])
    turn = make_request("turn", [*first.token_ids, 7, 8, 9])
    run(engine, [turn])
    check(model, [first, *others, turn])
    assert engine.counters().num_host_hit_tokens >= 40


@of_each_kind
def test_sampled_requests_survive_preemption(subject: tuple[Path, PreTrainedModel]) -> None:
    folder, _ = subject
    sampling = [
        SamplingParams(temperature=0.8, top_k=40, top_p=0.95, seed=1),
        SamplingParams(temperature=1.0, seed=2, frequency_penalty=0.3),
        SamplingParams(temperature=1.2, min_p=0.02, seed=3, repetition_penalty=1.2),
        GREEDY,
    ]
    some = prompts(4, 40, seed=6)

    def outputs(num_blocks: int) -> tuple[list[list[int]], int]:
        engine = make_engine(folder, num_blocks=num_blocks, budget=24)
        requests = [make_request(str(index), prompt, 40, sampling[index]) for index, prompt in enumerate(some)]
        run(engine, requests)
        return [request.token_ids for request in requests], engine.counters().num_preemptions

    roomy, none = outputs(200)
    tight, preemptions = outputs(13 + state_pages(folder))
    assert none == 0
    assert preemptions > 0
    assert tight == roomy
