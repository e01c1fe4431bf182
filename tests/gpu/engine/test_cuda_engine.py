"""The engine over the CUDA executor: Transformers' tokens, the CPU executor's draws, whatever the scheduler does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.engine.gpu_engines import (
    GREEDY,
    MODELS,
    VOCAB_SIZE,
    check_greedy,
    engine_over,
    executor_for,
    generate,
    leader_of,
    make_model,
    make_prompts,
    other_choices,
    tokens_of,
)
from support.sampling.sampling_rig import random_inits
from transformers import PreTrainedModel

from baton.rpc.errors import NoCapacity
from baton.worker.core import BlockId, SamplingParams, StepPlan
from baton.worker.executors.base import DeviceLost, Executor
from baton.worker.process.step_trace import StepTrace, TracedExecutor

pytestmark = pytest.mark.gpu

FP32_ROUNDING = 1e-4
BF16_ROUNDING = 0.06
SAMPLING = [
    *(SamplingParams(temperature=1.0, seed=index * 7919 + 1) for index in range(5)),
    *(SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=index) for index in range(5)),
    SamplingParams(temperature=1.2, min_p=0.05, seed=99),
    SamplingParams(temperature=0.0, repetition_penalty=1.3),
    SamplingParams(temperature=0.7, presence_penalty=1.0, frequency_penalty=0.5, seed=5, logprobs=3),
    SamplingParams(temperature=0.0, logprobs=0),
    SamplingParams(temperature=0.0, logit_bias=((7, 50.0),)),
    SamplingParams(temperature=1.0, allowed_token_ids=(5, 6, 7, 8), seed=3),
    SamplingParams(temperature=0.0, min_tokens=5, suppressed_token_ids=tuple(range(900))),
    SamplingParams(temperature=1.0, top_p=0.5, seed=2**64 - 1),
    SamplingParams(temperature=2.0, seed=11, top_k=1),
    SamplingParams(temperature=0.5, seed=12, logprobs=5),
]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("llama")
    return folder, make_model("llama-128", folder)


@pytest.fixture(scope="module")
def executor(llama: tuple[Path, PreTrainedModel]) -> Iterator[Executor]:
    executor = executor_for(llama[0])
    yield executor
    executor.close()


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = make_model(name, tmp_path)
    prompts = make_prompts()
    found = tokens_of(generate(engine_over(executor_for(tmp_path)), prompts))
    assert all(len(output) == 24 for output in found)
    assert check_greedy(model, prompts, found, FP32_ROUNDING) > 400


@pytest.mark.parametrize("name", MODELS)
def test_in_bfloat16_the_first_choice_is_the_same_beyond_rounding(name: str, tmp_path: Path) -> None:
    model = make_model(name, tmp_path, torch.bfloat16)
    prompts = make_prompts()
    found = tokens_of(generate(engine_over(executor_for(tmp_path, dtype="bfloat16")), prompts))
    if name.startswith("phimoe"):
        # It drops experts whose scores fall below a threshold. Rounding moves scores across it, in Transformers too.
        ours, own = other_choices(model, prompts, found, BF16_ROUNDING)
        assert ours <= 2 * own + 2
    else:
        assert check_greedy(model, prompts, found, BF16_ROUNDING) > 100


def test_sampled_requests_are_those_of_the_cpu_executor(
    llama: tuple[Path, PreTrainedModel], executor: Executor
) -> None:
    prompts = make_prompts(seed=1)
    ours = generate(engine_over(executor), prompts, sampling=SAMPLING)
    theirs = generate(engine_over(executor_for(llama[0], executor="cpu")), prompts, sampling=SAMPLING)
    assert tokens_of(ours) == tokens_of(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert len(one.logprobs) == len(other.logprobs)
        for mine, yours in zip(one.logprobs, other.logprobs, strict=True):
            assert mine.logprob == pytest.approx(yours.logprob, abs=1e-3)
            assert mine.top_logprobs == pytest.approx(yours.top_logprobs, abs=1e-3)
            assert mine.rank == yours.rank


def test_a_thousand_mixed_requests_get_the_tokens_of_the_cpu_executor(llama: tuple[Path, PreTrainedModel]) -> None:
    requests = random_inits(1000, VOCAB_SIZE, seed=29, narrow=VOCAB_SIZE)
    prompts = [init.token_ids[: init.num_prompt_tokens].tolist() for init in requests]
    sampling = [init.sampling for init in requests]
    tight = engine_over(executor_for(llama[0], num_blocks=60))
    ours = tokens_of(generate(tight, prompts, 16, sampling))
    theirs = tokens_of(generate(engine_over(executor_for(llama[0], executor="cpu")), prompts, 16, sampling))
    assert tight.counters().num_preemptions > 0
    assert sum(map(len, theirs)) == 16 * len(requests)
    # Logits differ by a rounding between the two, so that one draw in many thousands may.
    unequal = [index for index, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]]
    assert len(unequal) <= 2, unequal


def test_without_graphs_the_tokens_are_the_same(llama: tuple[Path, PreTrainedModel], executor: Executor) -> None:
    prompts = make_prompts(seed=2)
    plain = executor_for(llama[0], cuda_graphs=False)
    found = generate(engine_over(plain), prompts, sampling=SAMPLING)
    assert tokens_of(found) == tokens_of(generate(engine_over(executor), prompts, sampling=SAMPLING))


def test_steps_that_fill_the_budget_are_replayed_with_the_same_tokens(llama: tuple[Path, PreTrainedModel]) -> None:
    prompts = make_prompts((700, 650, 700, 300), seed=5)  # 1,200 and 1,150 tokens a step
    executor = executor_for(llama[0], max_num_batched_tokens=1200)
    pieces = leader_of(executor)._stepper.pieces
    assert pieces is not None
    assert pieces.fit(1150)
    assert not pieces.fit(1100)
    found = tokens_of(generate(engine_over(executor, budget=1200), prompts))
    assert check_greedy(llama[1], prompts, found, FP32_ROUNDING) > 80
    executor.close()


def test_requests_that_enter_and_leave_between_steps_are_not_disturbed(
    llama: tuple[Path, PreTrainedModel], executor: Executor
) -> None:
    assert executor.depth == 2
    prompts = make_prompts(seed=3)
    found = tokens_of(generate(engine_over(executor, budget=64), prompts, stagger=3))
    assert check_greedy(llama[1], prompts, found, FP32_ROUNDING) > 400


def test_a_stop_token_ends_a_request_whose_next_step_runs_already(executor: Executor) -> None:
    prompts = make_prompts((40,), seed=4)
    (whole,) = tokens_of(generate(engine_over(executor), prompts))
    first = whole.index(whole[9])
    engine = engine_over(executor)
    (cut,) = tokens_of(generate(engine, prompts, stop_token_ids=frozenset({whole[9]})))
    assert cut == whole[: first + 1]
    assert engine.counters().num_discarded_tokens <= 1


def test_prefix_hits_change_nothing(llama: tuple[Path, PreTrainedModel], executor: Executor) -> None:
    shared = make_prompts((150,), seed=5)[0]
    prompts = [shared + tail for tail in make_prompts((1, 5, 20, 60), seed=6)]
    engine = engine_over(executor)
    found = tokens_of(generate(engine, prompts, stagger=8))
    assert engine.counters().num_cached_tokens >= 3 * 144
    assert check_greedy(llama[1], prompts, found, FP32_ROUNDING) > 80


def test_preempted_requests_continue_unchanged(llama: tuple[Path, PreTrainedModel], executor: Executor) -> None:
    prompts = make_prompts((60, 70, 80, 90, 100, 50), seed=7)
    sampling = SAMPLING[:6]
    tight = engine_over(executor_for(llama[0], num_blocks=30))
    found = generate(tight, prompts, 60, sampling)
    assert tight.counters().num_preemptions > 0
    assert tokens_of(found) == tokens_of(generate(engine_over(executor), prompts, 60, sampling))


def test_out_of_memory_in_a_step_fails_its_requests_only(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    device = leader_of(executor)
    prompts = make_prompts((60, 20, 90, 33), seed=8)
    expected = tokens_of(generate(engine_over(executor), prompts))
    engine, compute, num_steps = engine_over(executor), device._compute, 0

    def run_out_once(plan: StepPlan) -> object:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 6:
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
        return compute(plan)

    monkeypatch.setattr(device, "_compute", run_out_once)
    # The later ones enter while the step fails.
    found = generate(engine, prompts, stagger=4)
    failed = [one for one in found if one.error is not None]
    assert failed
    assert all(isinstance(one.error, NoCapacity) for one in failed)
    assert [one.token_ids for one in found[2:]] == expected[2:]
    assert engine.counters().num_failed_steps == 1
    monkeypatch.undo()
    assert tokens_of(generate(engine, prompts)) == expected


def test_a_lost_device_ends_the_engine(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    device = leader_of(executor)

    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with")

    monkeypatch.setattr(device, "_compute", fail)
    monkeypatch.setattr(device, "_wait", fail)
    with pytest.raises(DeviceLost, match="illegal memory access"):
        generate(engine_over(executor), make_prompts((5,)))


def test_blocks_are_read_as_they_were_written(executor: Executor) -> None:
    size = executor.kv_spec.layer_bytes(0)
    block_ids = [BlockId(block) for block in (7, 3, 599)]
    data = bytes(range(256)) * (3 * size // 256)
    executor.write_blocks(1, block_ids, memoryview(data))
    assert bytes(executor.read_blocks(1, block_ids)) == data
    assert bytes(executor.read_blocks(1, block_ids[1:2])) == data[size : 2 * size]


def test_a_step_trace_has_the_devices_time_and_gaps(llama: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    path = tmp_path / "steps"
    executor = executor_for(llama[0], trace_steps=str(path))
    trace = StepTrace(str(path))
    engine = engine_over(TracedExecutor(executor, trace))
    step = engine.step
    engine.step = lambda: trace.step(step)  # type: ignore[method-assign]
    generate(engine, make_prompts((40, 30)), sampling=GREEDY)
    trace.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) >= 24
    assert all(line["device_us"] > 0 for line in lines)
    assert all(line["gap_us"] >= 0 for line in lines[1:])
