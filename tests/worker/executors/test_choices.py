"""The kernels that are said to be chosen are those that the table chooses, and the reasons are the table's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from baton.kernels.table import (
    FEW_EXPERTS,
    FEW_ROUNDED_EXPERTS,
    HOPPER_DECODE,
    HOPPER_EXPERTS,
    HOPPER_ROUNDED_EXPERTS,
    SMALL_ADD,
    SPLIT_EXPERTS,
    Case,
    find,
)
from baton.worker.executors.choices import Choices, choices_of
from baton.worker.executors.facts import KernelChoice, Off
from baton.worker.models.config import ModelConfig
from baton.worker.models.presets import PRESETS
from baton.worker.models.registry import parse_config

LLAMA = parse_config(PRESETS["llama-3.1-8b"], "preset")
HOPPER = Case("cuda", 9)
PREFILL = "attention.prefill_hopper.prefill_attention_hopper"
DECODE = "attention.decode_hopper.split_decode"


def choose(case: Case, model: ModelConfig = LLAMA, formats: tuple[str, ...] = ("unquantized",)) -> Choices:
    return choices_of(model, case, 256, 2048, formats)


def model_of(architecture: str, **fields: Any) -> ModelConfig:
    return parse_config({**PRESETS["llama-3.1-8b"], "architectures": [architecture], **fields}, "config")


def kernels(choices: Choices, op: str) -> list[tuple[str, str]]:
    return [(one.kernel, one.where) for one in choices.kernels if one.op == op]


def test_hoppers_kernels_are_chosen_up_to_the_table_s_limits() -> None:
    choices = choose(HOPPER)
    assert kernels(choices, "prefill_attention") == [(PREFILL, "")]
    most = (HOPPER_DECODE.cells.stop - 1) // LLAMA.num_kv_heads
    others = ("attention.decode.decode_attention", f"from {most + 1} requests")
    assert kernels(choices, "decode_attention") == [(DECODE, f"up to {most} requests"), others]
    small = f"up to {SMALL_ADD.tokens.stop - 1} tokens"
    assert kernels(choices, "add") == [("linear.small_linear.small_linear", small), ("torch.addmm", "from 65 tokens")]
    assert choices.off == ()


@pytest.mark.parametrize("count", [1, 16, 17, 33, 34, 64, 65, 255, 256])
def test_each_size_is_in_the_range_of_its_row(count: int) -> None:
    for one in choose(HOPPER).kernels:
        if one.op != "decode_attention":
            continue
        first, last = (1, int(one.where.split()[2])) if "up to" in one.where else (int(one.where.split()[1]), 256)
        row = find("decode_attention", replace(HOPPER, head_dim=128, num_cells=count * LLAMA.num_kv_heads))
        assert (first <= count <= last) == row.path.endswith(one.kernel.rpartition(".")[2])


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (replace(HOPPER, stored=torch.float8_e4m3fn), "KV in float8_e4m3fn"),
        (replace(HOPPER, dtype=torch.float32), "float32"),
        (replace(HOPPER, batch_invariant=True), "--batch-invariant"),
    ],
)
def test_a_setting_that_rules_hoppers_prefill_out_is_named(case: Case, reason: str) -> None:
    assert Off(PREFILL, reason) in choose(case).off


def test_a_model_s_properties_that_rule_kernels_out_are_named_with_their_layers() -> None:
    windows = model_of("Qwen2ForCausalLM", use_sliding_window=True, sliding_window=64, max_window_layers=24)
    assert Off(PREFILL, "windows, 8 of 32 layers") in choose(HOPPER, windows).off
    gemma = model_of("Gemma2ForCausalLM", head_dim=256)
    assert Off(DECODE, "head_dim 256, soft caps") in choose(HOPPER, replace(gemma, layers=gemma.layers[1:2])).off


def test_an_older_card_is_refused_nothing_that_is_not_made_for_it() -> None:
    assert choose(Case("cuda", 8)).off == ()


def test_biases_are_fused_and_norms_and_scales_are_not() -> None:
    fused = kernels(choose(HOPPER, model_of("LlamaForCausalLM", attention_bias=True)), "project")
    assert fused[0] == ("linear.small_linear.small_linear", "up to 16 tokens")
    for model in (model_of("GraniteForCausalLM", residual_multiplier=0.5), model_of("CohereForCausalLM")):
        assert kernels(choose(HOPPER, model), "project") == [("torch.addmm", "")]
        assert Off("linear.small_linear.small_linear", "LayerNorm or scaled updates") in choose(HOPPER, model).off


def test_experts_have_kernels_by_the_tokens_of_a_step() -> None:
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "mlp_only_layers": [0]}
    moe = model_of("Qwen3MoeForCausalLM", **experts)
    few, many, hopper = kernels(choose(HOPPER, moe), "run_experts")
    last = int(FEW_EXPERTS.pairs_per_expert[1] * 128 / 8)
    first = int(HOPPER_EXPERTS.pairs_per_expert[0] * 128 / 8)
    assert few == ("moe.few.run_few", f"up to {last} tokens, 31 of 32 layers")
    assert many == ("moe.experts.run_experts", f"{last + 1} to {first - 1} tokens, 31 of 32 layers")
    assert hopper == ("moe.experts_hopper.run_experts_hopper", f"from {first} tokens, 31 of 32 layers")


def test_packed_experts_have_kernels_by_the_tokens_of_a_step() -> None:
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    moe = model_of("Qwen3MoeForCausalLM", **experts)
    found = choose(replace(HOPPER, weights="rounding"), moe, ("fp8",))
    few, more = (int(row.pairs_per_expert[1] * 128 / 8) for row in (SPLIT_EXPERTS, FEW_ROUNDED_EXPERTS))
    many = int(HOPPER_ROUNDED_EXPERTS.pairs_per_expert[0] * 128 / 8)
    assert kernels(found, "run_experts") == [
        ("moe.few_packed.run_few_packed", "up to 4 tokens"),
        ("moe.experts_fp8.run_split_experts", f"5 to {few} tokens"),
        ("moe.experts_fp8.run_few_rounded_experts", f"{few + 1} to {more} tokens"),
        ("moe.experts.run_rounded_experts", f"{more + 1} to {many - 1} tokens"),
        ("moe.experts_hopper_fp8.run_rounded_experts_hopper", f"from {many} tokens"),
    ]
    assert Off("moe.few.run_few", "packed experts") in found.off
    assert not kernels(choose(Case("cpu", weights="packed"), moe, ("fp8",)), "run_experts")


def test_sinks_rule_hoppers_attention_out() -> None:
    sinks = tuple(replace(layer, attention=replace(layer.attention, sinks=True)) for layer in LLAMA.layers)
    assert Off(PREFILL, "sinks") in choose(HOPPER, replace(LLAMA, layers=sinks)).off


def test_quantized_linears_are_their_format_s_own() -> None:
    assert {one.op for one in choose(HOPPER, formats=("fp8",)).kernels} == {"prefill_attention", "decode_attention"}


def test_a_cpu_has_the_reference() -> None:
    (decode,) = (one for one in choose(Case("cpu", dtype=torch.float32)).kernels if one.op == "decode_attention")
    assert decode == KernelChoice("decode_attention", "reference.attention.paged_attention.attend_decode")


def test_images_of_a_model_whose_text_part_is_served_are_off() -> None:
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "head_dim": 16},
    }
    choices = choose(Case("cpu"), parse_config(config, "config"))
    assert choices.off == (Off("images", "only the text part of Gemma3ForConditionalGeneration is served"),)
