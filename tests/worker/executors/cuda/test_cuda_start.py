"""The start of the CUDA executor: refusals, steps and logs. Needs no GPU, because torch.cuda is replaced."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from baton.kernels.pooling_spec import PICKS
from baton.rpc.errors import InvalidRequest, Mismatch, NoCapacity
from baton.worker.config import WorkerConfig
from baton.worker.core import PoolingTask, StepPlan
from baton.worker.executors.base import DeviceLost
from baton.worker.executors.cuda.failures import raise_if_lost, refusal_of
from baton.worker.executors.cuda.startup.facts import device_facts
from baton.worker.executors.cuda.startup.memory import (
    allocate_kv,
    check_weights_fit,
    graph_bytes,
    num_blocks_that_fit,
    num_kv_blocks,
    open_device,
)
from baton.worker.executors.cuda.startup.phases import StartPhases
from baton.worker.executors.cuda.startup.support import (
    check_supported,
    compute_dtype,
)
from baton.worker.executors.cuda.startup.warm_up import largest_step, small_steps
from baton.worker.executors.cuda.steps.graphs import graph_sizes
from baton.worker.executors.facts import Off
from baton.worker.executors.kv_dtype import dtype_name, kv_dtype
from baton.worker.kv_spec import full_spec
from baton.worker.models.config import ModelConfig
from baton.worker.models.kv_groups import kv_spec_of
from baton.worker.models.pooling.spec import PoolerSpec
from baton.worker.models.presets import PRESETS
from baton.worker.models.registry import parse_config
from baton.worker.transfer.layout import layout_message, spec_of
from baton.worker.weights.build import dummy_weights
from baton.worker.weights.loading import LoadedModel

GPU = torch.device("cuda", 0)
GIB = 1 << 30
MODEL = parse_config(PRESETS["llama-3.1-8b"], "preset")
CONFIG = WorkerConfig(executor="cuda")


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card of 80 GiB, 70 of them free."""
    fakes = {
        "is_available": lambda: True,
        "get_device_capability": lambda *_: (9, 0),
        "get_device_name": lambda *_: "NVIDIA Test",
        "mem_get_info": lambda *_: (70 * GIB, 80 * GIB),
        "memory_reserved": lambda *_: 6 * GIB,
        "max_memory_reserved": lambda *_: 18 * GIB,
        "set_device": lambda *_: None,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)


def refused(config: WorkerConfig = CONFIG, model: ModelConfig = MODEL) -> str:
    with pytest.raises(InvalidRequest) as caught:
        check_supported(config, model, compute_dtype(config, model), GPU)
    assert caught.value.field
    return caught.value.message


def of(**fields: object) -> ModelConfig:
    return parse_config({**PRESETS["llama-3.1-8b"], **fields}, "preset")


def test_a_card_that_fits_is_opened() -> None:
    assert open_device() == GPU


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("Found no NVIDIA driver on your system. Please check that", "no NVIDIA driver"),
        ("The NVIDIA driver on your system is too old (found version 11040). Please update", "too old"),
        ("Torch not compiled with CUDA enabled", "not compiled with CUDA"),
    ],
)
def test_a_missing_gpu_or_an_old_driver_is_named(monkeypatch: pytest.MonkeyPatch, reason: str, said: str) -> None:
    def fail() -> None:
        raise RuntimeError(reason)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", fail)
    with pytest.raises(Mismatch, match=said) as caught:
        open_device()
    assert "executor=cpu" in caught.value.message


def test_an_old_card_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    with pytest.raises(Mismatch, match=r"NVIDIA Test has compute capability 7\.5"):
        open_device()


def test_a_card_that_is_full_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: torch.device) -> None:
        raise RuntimeError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in")

    monkeypatch.setattr(torch.cuda, "set_device", fail)
    with pytest.raises(NoCapacity, match=r"NVIDIA Test cannot be opened \(CUDA error: out of memory\)") as caught:
        open_device()
    assert "nvidia-smi" in caught.value.message


def test_another_defect_of_a_card_is_not_called_a_full_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: torch.device) -> None:
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")

    monkeypatch.setattr(torch.cuda, "set_device", fail)
    with pytest.raises(RuntimeError, match="ECC"):
        open_device()


def test_a_model_that_does_not_fit_reports_needed_and_free_memory_and_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    check_weights_fit(MODEL, torch.bfloat16, GPU)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (10 * GIB, 80 * GIB))
    with pytest.raises(InvalidRequest, match=r"need 15\.0 GiB as bfloat16; 10\.0 of 80\.0 GiB are free.*smaller"):
        check_weights_fit(MODEL, torch.bfloat16, GPU)


def test_the_pool_gets_the_memory_left_by_weights_steps_and_others() -> None:
    # 4 GiB are others': 80 total, 70 free, 6 ours.
    assert num_blocks_that_fit(1 << 20, 0.9, 20 * GIB, GPU) == (72 - 4 - 20) * 1024
    with pytest.raises(InvalidRequest, match=r"no KV block fits.*gpu_memory_utilization"):
        num_blocks_that_fit(1 << 20, 0.5, 60 * GIB, GPU)


def test_the_number_of_blocks_is_set_or_by_memory_or_fits_beside_peak_and_graphs() -> None:
    def num_blocks(**values: int | float) -> int:
        return num_kv_blocks(replace(CONFIG, **values), 1 << 20, 2 * GIB, GPU)

    assert num_blocks(num_blocks=7, kv_cache_memory=GIB) == 7
    assert num_blocks(kv_cache_memory=3 << 20) == num_blocks(kv_cache_memory=(4 << 20) - 1) == 3
    assert num_blocks(gpu_memory_utilization=0.9) == num_blocks_that_fit(1 << 20, 0.9, (18 + 2) * GIB, GPU)
    with pytest.raises(InvalidRequest, match=r"kv_cache_memory=1048575 holds no block.*at least 1048576 bytes"):
        num_blocks(kv_cache_memory=(1 << 20) - 1)


def test_the_facts_of_a_start_name_the_card_the_kernels_and_what_is_off() -> None:
    model = parse_config(PRESETS["storyteller-7m"], "preset")
    weights = dummy_weights(model, torch.bfloat16)
    loaded = LoadedModel(model, weights, bytes(16), torch.ones(model.num_layers, 2))
    config = replace(CONFIG, cuda_graphs=False)
    bf16, spec = torch.bfloat16, kv_spec_of(model, bytes(16), 16, "bfloat16")
    facts = device_facts(config, loaded, bf16, bf16, spec, GPU, step_bytes=5, graph_bytes=0)
    assert (facts.device, facts.dtype) == ("NVIDIA Test, compute capability 9.0", "bfloat16")
    assert (facts.weight_format, facts.weight_bytes) == ("unquantized", weights.num_bytes)
    assert {one.op for one in facts.kernels} >= {"prefill_attention", "decode_attention", "project", "add"}
    assert Off("graphs of steps", "--no-cuda-graphs") in facts.off
    assert any(one.feature.startswith("attention.prefill_hopper") for one in facts.off)
    invariant = device_facts(replace(CONFIG, batch_invariant=True), loaded, bf16, bf16, spec, GPU, 5, 0)
    assert Off("graphs of layers", "--batch-invariant") in invariant.off


def test_graphs_count_by_their_number_and_the_largest() -> None:
    few, many = graph_bytes(MODEL, torch.bfloat16, [1, 8]), graph_bytes(MODEL, torch.bfloat16, [1, 4, 8])
    assert many - few == 8 << 20
    assert graph_bytes(MODEL, torch.bfloat16, [1, 512]) > few


def test_a_pool_beyond_memory_is_refused_with_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = full_spec(bytes(16), "bfloat16", num_layers=2, num_kv_heads=2, head_dim=64, block_size=16)

    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    pool = allocate_kv(spec, torch.bfloat16, 3, torch.device("cpu"))
    assert pool.shape == (2, 3, 2, 2, 16, 64)
    assert not pool.any()
    monkeypatch.setattr(torch, "zeros", fail)
    with pytest.raises(InvalidRequest, match=r"1000000 KV blocks need 15\.3 GiB, 70\.0 GiB are free"):
        allocate_kv(spec, torch.bfloat16, 1_000_000, GPU)


def test_unsupported_properties_are_named() -> None:
    check_supported(CONFIG, MODEL, torch.bfloat16, GPU)
    assert "block_size=8" in refused(replace(CONFIG, block_size=8))
    assert "head_dim is 320" in refused(model=of(head_dim=320))
    assert "head_dim is 20" in refused(model=of(head_dim=20))
    assert "intermediate_size is 1000" in refused(model=of(intermediate_size=1000))
    assert "not float32" in refused(replace(CONFIG, kv_cache_dtype="fp8_e4m3", dtype="float32"))


def test_experts_widths_are_checked() -> None:
    sizes = {"vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    experts = {"num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 2}
    config = {**sizes, **experts, "architectures": ["Qwen3MoeForCausalLM"], "head_dim": 16}
    check_supported(CONFIG, parse_config({**config, "moe_intermediate_size": 48}, "config"), torch.bfloat16, GPU)
    assert "intermediate_size is 40" in refused(model=parse_config({**config, "moe_intermediate_size": 40}, "config"))


def test_models_of_transformers_may_have_any_widths_but_no_batch_invariance() -> None:
    sizes = {"vocab_size": 160, "hidden_size": 72, "intermediate_size": 100, "num_attention_heads": 4, "head_dim": 24}
    raw = {**sizes, "num_hidden_layers": 2, "architectures": ["ArceeForCausalLM"]}
    model = parse_config(raw, "config", "transformers")
    check_supported(CONFIG, model, torch.bfloat16, GPU)
    assert "batch_invariant=True needs a family" in refused(replace(CONFIG, batch_invariant=True), model)


def test_means_of_causal_models_are_not_batch_invariant() -> None:
    invariant = replace(CONFIG, batch_invariant=True)
    poolers = {pick: PoolerSpec((PoolingTask.EMBED,), 8, pick) for pick in PICKS}
    for pick in ("first", "last", "max"):
        check_supported(invariant, replace(MODEL, pooler=poolers[pick]), torch.bfloat16, GPU)
    check_supported(CONFIG, replace(MODEL, pooler=poolers["mean"]), torch.bfloat16, GPU)
    assert "added up in chunks" in refused(invariant, replace(MODEL, pooler=poolers["mean"]))


def test_8_bit_kv_needs_a_gpu_that_supports_the_type(monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(CONFIG, kv_cache_dtype="fp8_e4m3")
    check_supported(config, MODEL, torch.bfloat16, GPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    assert "8.9" in refused(config)


def test_types_follow_the_configuration_and_travel_by_their_names() -> None:
    assert compute_dtype(CONFIG, replace(MODEL, dtype="float16")) is torch.float16
    assert compute_dtype(CONFIG, replace(MODEL, dtype="")) is torch.bfloat16
    assert compute_dtype(replace(CONFIG, dtype="float32"), MODEL) is torch.float32
    narrow = kv_dtype(replace(CONFIG, kv_cache_dtype="fp8_e4m3"), torch.bfloat16)
    assert kv_dtype(CONFIG, torch.float16) is torch.float16
    spec = full_spec(bytes(16), dtype_name(narrow), num_layers=2, num_kv_heads=2, head_dim=64, block_size=16)
    assert spec_of(layout_message(spec)) == spec


@pytest.mark.parametrize(
    ("executor", "field", "value", "needed"),
    [
        ("sim", "kv_cache_dtype", "fp8_e4m3", "cpu or cuda"),
        ("sim", "batch_invariant", True, "cpu or cuda"),
    ],
)
def test_other_executors_refuse_gpu_settings(field: str, value: object, executor: str, needed: str) -> None:
    replace(CONFIG, **{field: value}).validate()
    with pytest.raises(InvalidRequest, match=f"{field}={value} needs executor={needed}, got") as caught:
        replace(CONFIG, executor=executor, **{field: value}).validate()
    assert caught.value.field == field


def test_only_a_device_that_answers_nothing_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    raise_if_lost(error, lambda: None)

    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be")

    with pytest.raises(DeviceLost, match="illegal memory access") as caught:
        raise_if_lost(error, fail)
    assert "\n" not in caught.value.message
    assert caught.value.__cause__ is error
    assert "must be started again" in caplog.text


def test_a_failed_first_step_reports_a_fix() -> None:
    class OutOfResources(Exception):
        """As Triton's."""

    refusal = refusal_of(torch.OutOfMemoryError("CUDA out of memory. Tried"), CONFIG, MODEL, "bfloat16")
    assert refusal is not None
    assert refusal.field == "max_num_batched_tokens"
    refusal = refusal_of(OutOfResources("out of resource: shared memory, Required: 300000"), CONFIG, MODEL, "float32")
    assert refusal is not None
    assert "head_dim 128" in refusal.message
    assert "shared memory" in refusal.message
    assert refusal_of(ValueError("no"), CONFIG, MODEL, "float32") is None


@pytest.mark.parametrize("most", [1, 3, 16, 100, 256, 300, 512, 1024, 5000])
def test_graphs_cover_every_batch_with_little_padding(most: int) -> None:
    sizes = graph_sizes(most)
    assert sizes == sorted(set(sizes))
    assert (sizes[0], sizes[-1]) == (1, most)
    assert len(sizes) <= 64 if most <= 1024 else True
    for count in range(17, min(most, 4096) + 1):
        padded = next(size for size in sizes if size >= count)
        assert padded <= 1.25 * count + 16 or padded == most


def test_the_largest_step_fills_the_budget_with_prompts_that_can_be() -> None:
    assert largest_step(300, 128, 8).num_scheduled_tokens.tolist() == [127, 127, 46]
    assert largest_step(300, 128, 2).num_tokens == 254
    assert largest_step(100, 4096, 8).num_scheduled_tokens.tolist() == [100]


@pytest.mark.parametrize("num_rows", [1, 2, 20, 64, 300])
def test_warm_up_steps_keep_to_the_rules_of_a_plan(num_rows: int) -> None:
    plans = small_steps(num_rows, 1000)
    for plan in plans:
        check(plan, num_rows)
    assert any(plan.num_decodes == len(plan.rows) == num_rows for plan in plans)
    assert any(plan.num_decodes < len(plan.rows) for plan in plans)
    assert any(init.sampling.logprobs is not None for plan in plans for init in plan.admitted)
    assert any(plan.masks is not None for plan in plans)


def check(plan: StepPlan, num_rows: int) -> None:
    assert 0 < len(plan.rows) <= num_rows
    assert [init.row for init in plan.admitted] == plan.rows.tolist()
    known = [len(init.token_ids) for init in plan.admitted]
    assert (plan.num_computed_tokens + plan.num_scheduled_tokens).tolist() == known
    assert (plan.num_scheduled_tokens[: plan.num_decodes] == 1).all()
    for init in plan.admitted[: plan.num_decodes]:
        assert init.num_prompt_tokens < len(init.token_ids)


def test_a_start_logs_its_phases_and_the_progress_of_long_ones(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    times = iter([0.0, 1.5, 4.0])
    phases = StartPhases(lambda: None, lambda: next(times))
    phases.end("weights")
    report = phases.progress("decode graphs")
    for done in range(1, 11):
        report(done, 10)
    phases.end("decode graphs")
    phases.log(100, 16)
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "start: weights in 1.5 s"
    assert [line for line in lines if " of 10" in line] == [
        f"start: decode graphs, {done} of 10" for done in (2, 4, 6, 8)
    ]
    assert lines[-1].startswith("executor ready in 4.0 s (weights 1.5, decode graphs 2.5) with 100 blocks")
