"""The CPU executor alone, against Transformers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from support.engine.encoder_models import ENCODERS
from support.engine.step_harness import GREEDY, StepHarness
from support.engine.tiny_models import MODELS, VOCAB_SIZE, generate_greedily, load_transformers, make_model, prompts
from transformers import PreTrainedModel

from baton.rpc.errors import InternalError, InvalidRequest
from baton.worker.config import WorkerConfig
from baton.worker.core import BlockId, SamplingParams, StepPlan
from baton.worker.executors.cpu.executor import CpuExecutor
from baton.worker.models.supported.families import FAMILIES

SAMPLE_MODEL = Path(__file__).resolve().parents[4] / "models" / "storyteller-7m"
COUNT = 24

MakeExecutor = Callable[..., CpuExecutor]


class Subject:
    """One model in both worlds."""

    def __init__(self, folder: Path, model: PreTrainedModel, vocab_size: int) -> None:
        self.folder = folder
        self.prompts = prompts(6, 70, vocab_size)
        self._model = model
        self._expected: dict[tuple[int, ...], list[int]] = {}

    def expected(self, prompt: list[int], count: int = COUNT) -> list[int]:
        key = (*prompt, count)
        if key not in self._expected:
            self._expected[key] = generate_greedily(self._model, prompt, count)
        return self._expected[key]

    def exact(self) -> PreTrainedModel:
        """Returns the model in fp64, or in fp32 if it has experts, for which Transformers has no products of fp64.

        Where a state amplifies what sums round, values of fp32 are not exact enough to compare with.
        """
        has_experts = any(name.endswith("experts") for name, _ in self._model.named_modules())
        return self._model if has_experts else copy.deepcopy(self._model).double()

    def harness(self, **config: object) -> StepHarness:
        return StepHarness(make_executor(self.folder, **config))


def make_executor(folder: Path | str, **config: object) -> CpuExecutor:
    defaults = {"threads": 1, "block_size": 8, "num_blocks": 1024, "max_num_requests": 16}
    return CpuExecutor(WorkerConfig(model=str(folder), **{**defaults, **config}))  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=[*MODELS, "storyteller-7m"])
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    if request.param == "storyteller-7m":
        yield Subject(SAMPLE_MODEL, load_transformers(SAMPLE_MODEL), 4096)
    else:
        folder = tmp_path_factory.mktemp(request.param)
        yield Subject(folder, make_model(request.param, folder), VOCAB_SIZE)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    folder = tmp_path_factory.mktemp("llama")
    return Subject(folder, make_model("llama", folder), VOCAB_SIZE)


def test_every_family_has_a_row() -> None:
    for family in FAMILIES.values():
        rows = MODELS if family.generates else ENCODERS
        assert any(row.startswith(family.model_type) for row in rows), family.model_type


def test_a_single_request_equals_transformers(subject: Subject) -> None:
    harness = subject.harness()
    prompt = max(subject.prompts, key=len)
    running = harness.admit(prompt)
    harness.run(COUNT)
    assert running.output == subject.expected(prompt)


@pytest.mark.parametrize("chunk", [5, 16, 1000])
def test_a_mixed_batch_in_chunks_equals_transformers(subject: Subject, chunk: int) -> None:
    harness = subject.harness()
    waiting = list(subject.prompts)
    admitted = [harness.admit(waiting.pop(0)) for _ in range(2)]
    while waiting:
        harness.run_step(chunk)
        admitted.append(harness.admit(waiting.pop(0)))
    harness.run(COUNT, chunk)
    for running, prompt in zip(admitted, subject.prompts, strict=True):
        assert running.output[:COUNT] == subject.expected(prompt)


def test_a_shared_prefix_is_computed_once(subject: Subject) -> None:
    prompt = max(subject.prompts, key=len)
    harness = subject.harness()
    first = harness.admit(prompt)
    harness.run(COUNT)
    num_shared = (len(prompt) - 1) // 8
    other = [*prompt[: num_shared * 8], 7, 9]
    again = harness.admit(prompt, shared_blocks=first.block_ids[:num_shared])
    branch = harness.admit(other, shared_blocks=first.block_ids[:num_shared])
    harness.run(COUNT, chunk=3)
    assert again.output == subject.expected(prompt)
    assert branch.output == subject.expected(other)


def test_a_preempted_request_continues_in_another_row_and_other_blocks(subject: Subject) -> None:
    harness = subject.harness()
    admitted = [harness.admit(prompt) for prompt in subject.prompts[:3]]
    for _ in range(6):
        harness.run_step()
    victim = admitted[0]
    harness.free(victim)
    harness.run_step()
    again = harness.admit(subject.prompts[0], output=victim.output)
    harness.run(COUNT, chunk=9)
    assert again.output == subject.expected(subject.prompts[0])


def test_sequences_of_very_different_length_decode_in_groups(llama: Subject) -> None:
    harness = llama.harness()
    various = [
        prompts(1, 1, seed=1)[0],
        prompts(1, 400, seed=12)[0],
        prompts(1, 5, seed=3)[0],
        prompts(1, 400, seed=5)[0],
    ]
    assert max(map(len, various)) > 100
    admitted = [harness.admit(prompt) for prompt in various]
    harness.run(COUNT)
    assert [one.output for one in admitted] == [llama.expected(prompt) for prompt in various]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_dtypes_stay_close_to_fp32(llama: Subject, dtype: str) -> None:
    wide, narrow = llama.harness(), llama.harness(dtype=dtype)
    asked = SamplingParams(temperature=0.0, logprobs=0)
    prompt = max(llama.prompts, key=len)
    ours, theirs = wide.admit(prompt, asked), narrow.admit(prompt, asked)
    wide.run(1)
    narrow.run(1)
    assert narrow.executor.kv_spec.groups[0].dtype == dtype
    assert narrow.executor.kv_spec.bytes_per_block * 2 == wide.executor.kv_spec.bytes_per_block
    assert theirs.logprobs[0].logprob == pytest.approx(ours.logprobs[0].logprob, abs=0.25)


def test_blocks_that_were_read_here_and_written_there_decode_alike(subject: Subject) -> None:
    sender, receiver = subject.harness(), subject.harness()
    prompt = max(subject.prompts, key=len)
    first = sender.admit(prompt)
    sender.run(1)
    num_blocks = -(-len(prompt) // 8)
    there = [receiver.free_blocks.pop() for _ in range(num_blocks)]
    for layer in range(sender.executor.kv_spec.num_layers):
        data = sender.executor.read_blocks(layer, sender.in_layer(first.block_ids[:num_blocks], layer))
        receiver.executor.write_blocks(layer, receiver.in_layer(there, layer), memoryview(data))
        assert receiver.executor.read_blocks(layer, receiver.in_layer(there, layer)) == data
    running = receiver.admit(prompt, output=first.output)
    running.block_ids, running.num_computed = list(there), len(prompt)
    receiver.run(COUNT)
    assert running.output == subject.expected(prompt)


def test_the_hook_sees_each_layer_once_its_kv_is_written(llama: Subject) -> None:
    harness = llama.harness()
    running = harness.admit(prompts(1, 20, seed=3)[0])
    seen: list[tuple[int, bytes]] = []

    def hook(plan: StepPlan, layer: int) -> None:
        seen.append((layer, bytes(harness.executor.read_blocks(layer, running.block_ids))))

    harness.executor.watch_layers(hook)
    harness.run_step()
    assert [layer for layer, _ in seen] == [0, 1, 2]
    for layer, data in seen:
        assert any(data)
        assert harness.executor.read_blocks(layer, running.block_ids) == data


def test_a_sampled_request_does_not_depend_on_its_company(llama: Subject) -> None:
    warm = SamplingParams(temperature=0.9, top_p=0.9, seed=2**63 + 11, logprobs=2)
    company = [
        SamplingParams(temperature=1.3, seed=1),
        SamplingParams(temperature=0.7, top_k=40, seed=2),
        SamplingParams(temperature=1.0, repetition_penalty=1.3, presence_penalty=0.5, seed=3),
        GREEDY,
    ]
    alone = llama.harness()
    expected = alone.admit(llama.prompts[0], warm)
    alone.run(COUNT)
    harness = llama.harness()
    for prompt, sampling in zip(llama.prompts[1:], company, strict=False):
        harness.admit(prompt, sampling)
    harness.run_step(4)
    running = harness.admit(llama.prompts[0], warm)
    harness.run(COUNT, chunk=6)
    assert running.output == expected.output
    assert len(set(running.output)) > 4
    assert len(running.logprobs) == COUNT


def test_a_sampled_request_survives_preemption_unchanged(llama: Subject) -> None:
    warm = SamplingParams(temperature=0.9, frequency_penalty=0.4, repetition_penalty=1.1, seed=7)
    harness = llama.harness()
    whole = harness.admit(llama.prompts[0], warm)
    harness.run(COUNT)
    cut = llama.harness()
    resumed = cut.admit(llama.prompts[0], warm, output=whole.output[:9])
    cut.run(COUNT)
    assert resumed.output == whole.output


def test_logprobs_are_the_models_own(subject: Subject) -> None:
    harness = subject.harness()
    bent = SamplingParams(temperature=1.5, top_k=30, presence_penalty=1.0, logit_bias=((5, 3.0),), seed=4, logprobs=3)
    running = harness.admit(subject.prompts[1], bent)
    harness.run(5)
    with torch.no_grad():
        logits = subject.exact()(torch.tensor([running.token_ids[:-1]])).logits[0, -5:]
    expected = torch.log_softmax(logits, -1)
    for row, (token_id, logprobs) in enumerate(zip(running.output, running.logprobs, strict=True)):
        assert logprobs.logprob == pytest.approx(expected[row, token_id].item(), abs=1e-4)
        assert logprobs.rank == int((expected[row] > expected[row, token_id]).sum()) + 1
        top = expected[row].topk(3)
        assert logprobs.top_token_ids == tuple(top.indices.tolist())
        assert logprobs.top_logprobs == pytest.approx(top.values.tolist(), abs=1e-4)


def test_logprobs_of_zero_alternatives_are_the_token_alone(llama: Subject) -> None:
    harness = llama.harness()
    running = harness.admit(llama.prompts[1], SamplingParams(temperature=0.0, logprobs=0))
    other = harness.admit(llama.prompts[2], SamplingParams(temperature=0.0, logprobs=5))
    harness.run(1)
    assert running.logprobs[0].rank == 1
    assert running.logprobs[0].top_token_ids == ()
    assert len(other.logprobs[0].top_token_ids) == 5


def test_only_allowed_tokens_are_drawn(llama: Subject) -> None:
    harness = llama.harness()
    running = harness.admit(llama.prompts[0], SamplingParams(temperature=2.0, allowed_token_ids=(4, 8, 15), top_k=50))
    free = harness.admit(llama.prompts[1])
    harness.run(COUNT)
    assert set(running.output) == {4, 8, 15}
    assert free.output == llama.expected(llama.prompts[1])


def test_suppressed_tokens_come_only_after_min_tokens(llama: Subject) -> None:
    prompt = llama.prompts[0]
    first = llama.expected(prompt)[0]
    harness = llama.harness()
    running = harness.admit(
        prompt,
        SamplingParams(temperature=0.0, min_tokens=3, suppressed_token_ids=(first,), logit_bias=((first, 90.0),)),
    )
    harness.run(5)
    assert first not in running.output[:3]
    assert running.output[3:] == [first, first]


def test_tokens_outside_the_vocabulary_are_ignored_with_a_warning(
    llama: Subject, caplog: pytest.LogCaptureFixture
) -> None:
    harness = llama.harness()
    running = harness.admit(llama.prompts[0], SamplingParams(temperature=0.0, logit_bias=((VOCAB_SIZE, 9.0),)))
    harness.run(2)
    assert running.output == llama.expected(llama.prompts[0])[:2]
    assert "outside the vocabulary" in caplog.text


def test_a_plan_beyond_its_rows_blocks_is_an_error_that_others_survive(llama: Subject) -> None:
    harness = llama.harness()
    running = harness.admit(llama.prompts[0])
    harness.run_step()
    plan = StepPlan(
        50,
        rows=np.array([running.row], np.int32),
        num_scheduled_tokens=np.array([1], np.int32),
        num_computed_tokens=np.array([1000], np.int32),
        samples=np.array([True]),
        num_decodes=1,
    )
    with pytest.raises(InternalError, match="step 50 computes row 0 to token 1001"):
        harness.executor.launch(plan)
    harness.run(COUNT)
    assert running.output == llama.expected(llama.prompts[0])


def test_an_empty_step_is_a_step(llama: Subject) -> None:
    executor = make_executor(llama.folder)
    executor.launch(StepPlan(3, freed=[]))
    result = executor.collect()
    assert result.step == 3
    assert result.token_ids.size == 0


def test_transfers_of_blocks_that_do_not_exist_are_refused(llama: Subject) -> None:
    executor = make_executor(llama.folder)
    with pytest.raises(InvalidRequest, match=r"block 1024 does not exist: allowed are 0 to 1023"):
        executor.read_blocks(0, [BlockId(3), BlockId(1024)])
    with pytest.raises(InvalidRequest, match=r"layer 3 does not exist: allowed are 0 to 2"):
        executor.read_blocks(3, [BlockId(0)])
    with pytest.raises(InvalidRequest, match=r"7 bytes for layer 0 of 1 blocks; it must be 2048"):
        executor.write_blocks(0, [BlockId(0)], memoryview(bytes(7)))


def test_sizes_that_cannot_work_are_refused_at_start(llama: Subject) -> None:
    with pytest.raises(InvalidRequest, match=r"kv_cache_memory=1000 holds no block: it must be at least 6144 bytes"):
        make_executor(llama.folder, num_blocks=0, kv_cache_memory=1000)
    for size in (1 << 60, 1 << 80):
        with pytest.raises(InvalidRequest, match=r"this machine does not give .*: lower kv_cache_memory or num_blocks"):
            make_executor(llama.folder, num_blocks=0, kv_cache_memory=size)
    with pytest.raises(InvalidRequest, match=r"max_model_len=9999 is beyond the model's own limit: at most 512"):
        make_executor(llama.folder, max_model_len=9999)


def test_dynamic_rope_extends_a_model_on_request(tmp_path: Path) -> None:
    make_model("llama-dynamic-rope", tmp_path)
    short, long = make_executor(tmp_path), make_executor(tmp_path, max_model_len=2000)
    assert (short.model.max_model_len, long.model.max_model_len) == (512, 2000)
    assert short.model.digest != long.model.digest
    long.use_weights(long.read_weights(""))
    with pytest.raises(InvalidRequest, match=r"max_model_len=4096 is beyond the model's own limit: at most 2048"):
        make_executor(tmp_path, max_model_len=4096)


def test_memory_sets_the_number_of_blocks(llama: Subject) -> None:
    assert make_executor(llama.folder, num_blocks=0, kv_cache_memory=10 * 6144 + 5).num_blocks == 10


def test_dummy_weights_are_the_same_everywhere() -> None:
    first, second = (make_executor("storyteller-7m", load_format="dummy") for _ in range(2))
    assert first.model == second.model
    outputs = []
    for executor in (first, second):
        harness = StepHarness(executor)
        running = harness.admit([1, 2, 3])
        harness.run(4)
        outputs.append(running.output)
    assert outputs[0] == outputs[1]
