"""Batch-invariant steps on a CPU: a request has the same bits in any batch, as seen in its log-probabilities."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.engine.tiny_models import make_model, prompts

from baton.rpc.errors import InvalidRequest
from baton.worker.config import WorkerConfig
from baton.worker.core import Request, SamplingParams, StopConditions, TokenLogprobs
from baton.worker.engine.engine import Engine
from baton.worker.executors.cpu.executor import CpuExecutor
from baton.worker.scheduling.settings import EngineSettings

SAMPLE_MODEL = Path(__file__).resolve().parents[4] / "models" / "storyteller-7m"
SAMPLED = SamplingParams(temperature=1.0, top_p=0.95, seed=7, logprobs=3)
COUNT = 24
BLOCK_SIZE = 8

Bits = list[tuple[int, TokenLogprobs | None]]


SUBJECTS = [
    "mistral-window",
    "gemma3_text",
    "storyteller-7m",
    "storyteller-7m-bfloat16",
    "mixtral",
    "glm4_moe",
    "youtu",
    "deepseek_v3",
    "deepseek_v3-bfloat16",
    "qwen2_moe",
    "qwen3_next",
    "qwen3_5_text",
    "granitemoehybrid-mamba",
    "lfm2",
    "kimi_linear",
]


@pytest.fixture(scope="module", params=SUBJECTS)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    name = request.param.removesuffix("-bfloat16")
    dtype = "bfloat16" if name != request.param else "float32"
    if name == "storyteller-7m":
        return SAMPLE_MODEL, dtype
    folder = tmp_path_factory.mktemp(name)
    make_model(name, folder)
    return folder, dtype


def make_executor(subject: tuple[Path, str], num_blocks: int = 300, threads: int = 2) -> CpuExecutor:
    config = WorkerConfig(
        executor="cpu",
        model=str(subject[0]),
        dtype=subject[1],
        threads=threads,
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        max_num_requests=16,
        batch_invariant=True,
    )
    config.validate()
    return CpuExecutor(config)


@pytest.fixture(scope="module")
def executor(subject: tuple[Path, str]) -> CpuExecutor:
    return make_executor(subject)


def make_engine(executor: CpuExecutor, budget: int = 512) -> Engine:
    settings = EngineSettings(max_num_requests=16, max_num_batched_tokens=budget, cache_outputs=False)
    return Engine(executor, settings, epoch=1)


def generate(
    engine: Engine, given: list[list[int]], num_prompt_tokens: int | None = None, stagger: int = 0
) -> list[Bits]:
    """Returns tokens and log-probabilities. Submits a prompt every `stagger` steps; 0: all at once."""
    waiting = [
        Request(
            str(index),
            list(prompt),
            num_prompt_tokens or len(prompt),
            SAMPLED,
            StopConditions(COUNT),
            bytes(16),
        )
        for index, prompt in enumerate(given)
    ]
    found: dict[str, Bits] = {request.request_id: [] for request in waiting}
    for step in range(10_000):
        while waiting and (not stagger or step % stagger == 0):
            engine.submit(waiting.pop(0))
            if stagger:
                break
        if not waiting and not engine.has_work():
            return list(found.values())
        outputs = engine.step()
        assert not outputs.failures
        for request, token_id, logprobs in outputs.tokens():
            found[request.request_id].append((token_id, logprobs))
    raise AssertionError("the engine does not finish")


def test_alone_and_in_a_crowd_every_bit_is_the_same(executor: CpuExecutor) -> None:
    some = prompts(12, 90, seed=1)
    together = generate(make_engine(executor), some)
    for index in (0, 1, 5, 11):
        assert generate(make_engine(executor), [some[index]]) == [together[index]], f"prompt of {len(some[index])}"


@pytest.mark.parametrize("budget", [20, 150])
def test_however_prompts_are_cut_and_mixed_with_decodes(executor: CpuExecutor, budget: int) -> None:
    some = prompts(8, 150, seed=2)
    assert generate(make_engine(executor, budget), some, stagger=2) == generate(make_engine(executor), some)


def test_preemptions_and_prefix_hits_leave_no_trace(subject: tuple[Path, str], executor: CpuExecutor) -> None:
    (shared,) = [prompt for prompt in prompts(9, 90, seed=3) if len(prompt) > 40][:1]
    some = [shared[:40] + tail for tail in prompts(6, 20, seed=4)]
    groups = executor.kv_spec.groups
    num_blocks = 18 if len(groups) == 1 else 10 + 4 * executor.kv_spec.pages_each(groups[-1])
    tight = make_engine(make_executor(subject, num_blocks=num_blocks), 64)
    found = generate(tight, some, stagger=2)
    assert tight.counters().num_preemptions > 0
    assert tight.counters().num_cached_tokens > 0
    assert found == [generate(make_engine(executor), [prompt])[0] for prompt in some]


def test_a_resumed_output_continues_with_the_same_bits(executor: CpuExecutor) -> None:
    (prompt,) = prompts(1, 70, seed=5)
    (whole,) = generate(make_engine(executor), [prompt])
    begun = [token_id for token_id, _ in whole[:9]]
    (rest,) = generate(make_engine(executor), [prompt + begun], len(prompt))
    assert rest == whole[9:]


def test_threads_do_not_change_bits(subject: tuple[Path, str], executor: CpuExecutor) -> None:
    some = prompts(5, 60, seed=6)
    before = torch.get_num_threads()
    several = generate(make_engine(executor), some)
    alone = generate(make_engine(make_executor(subject, threads=1)), some)
    torch.set_num_threads(before)
    assert alone == several


def test_what_depends_on_other_tokens_is_refused(tmp_path: Path) -> None:
    for name, reason in (
        ("gemma2", "soft caps"),
        ("gpt_oss", "sinks"),
    ):
        folder = tmp_path / name
        make_model(name, folder)
        with pytest.raises(InvalidRequest, match=f"batch_invariant=True.*{reason}") as caught:
            make_executor((folder, "auto"))
        assert caught.value.field == "batch_invariant"


def test_quantized_experts_are_refused(tmp_path: Path) -> None:
    make_model("mixtral", tmp_path)
    config = WorkerConfig(executor="cpu", model=str(tmp_path), quantization="fp8", num_blocks=8, batch_invariant=True)
    with pytest.raises(InvalidRequest, match=r"batch_invariant=True.*a sum of experts in .*fp8.* depends") as caught:
        CpuExecutor(config)
    assert caught.value.field == "batch_invariant"
