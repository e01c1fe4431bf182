"""Quantized models on a GPU have nearly the distribution of the weights that the packed ones mean."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from support.engine.gpu_engines import engine_over, executor_for, generate
from support.engine.packed import bitsandbytes
from support.engine.packed import models as packed_models
from support.engine.packed.cells import rounded
from support.engine.packed.models import FORMATS, write
from support.gguf.files import write_gguf

from baton.rpc.errors import ServiceError
from baton.worker.core import SamplingParams
from baton.worker.executors.base import Executor

pytestmark = pytest.mark.gpu

ALL = {**FORMATS, **bitsandbytes.FORMATS}
# A format of each kernel, and of parts that are kept apart.
NAMES = [
    "fp8-tensor",
    "fp8-blocks-across-parts",
    "compressed-fp8-channel",
    "compressed-int8-zeros",
    "compressed-w4a16-order",
    "compressed-mxfp4",
    "gptq-zeros",
    "gptq-order",
    "awq",
    "modelopt-nvfp4",
    "bitsandbytes-nf4",
    "bitsandbytes-int8",
]
ASKING = SamplingParams(temperature=0.0, logprobs=20)
# Up to 32 tokens of a step, and 11 an expert, are not rounded; the long prompt is, in 8 bits.
LENGTHS, LONG = (3, 7, 20), (200,)


def distributions(executor: Executor, lengths: tuple[int, ...]) -> list[dict[int, float]]:
    """Returns the likeliest tokens after each prompt."""
    numbers = np.random.default_rng(3)
    prompts = [numbers.integers(3, 160, size=length).tolist() for length in lengths]
    found = generate(engine_over(executor), prompts, 2, ASKING)
    return [dict(zip(one.top_token_ids, one.top_logprobs, strict=True)) for each in found for one in each.logprobs[:1]]


def difference(one: list[dict[int, float]], other: list[dict[int, float]]) -> float:
    """Returns the mean difference of the log-probabilities of tokens in both."""
    return float(
        np.mean(
            [
                abs(mine[token] - yours[token])
                for mine, yours in zip(one, other, strict=True)
                for token in mine.keys() & yours.keys()
            ]
        )
    )


@pytest.mark.parametrize("name", NAMES)
def test_distributions_are_those_of_the_dequantized_weights(name: str, tmp_path: Path) -> None:
    packed, meant = tmp_path / "packed", tmp_path / "meant"
    model = packed_models.wide() if name.startswith("bitsandbytes") else packed_models.dense()
    write(packed, model, ALL[name]).save_pretrained(meant)
    ours, plain = (executor_for(folder, dtype="bfloat16") for folder in (packed, meant))
    assert "unquantized" not in ours.facts.weight_format
    assert difference(distributions(ours, LENGTHS), distributions(plain, LENGTHS)) < 0.05
    assert difference(distributions(ours, LONG), distributions(plain, LONG)) < (0.3 if "fp8" in name else 0.05)


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q8_0])
def test_a_gguf_file_has_the_distributions_of_its_dequantized_weights(kind: Kind, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", packed_models.dense(), kind)
    rounded(packed_models.dense(), kind).save_pretrained(tmp_path / "meant")
    ours, plain = (executor_for(folder, dtype="bfloat16") for folder in (path, tmp_path / "meant"))
    assert ours.facts.weight_format == f"gguf {kind.name}"
    for lengths in (LENGTHS, LONG):
        assert difference(distributions(ours, lengths), distributions(plain, lengths)) < 0.05


@pytest.mark.parametrize("tied", [False, True])
def test_packed_embeddings_have_the_distributions_of_their_dequantized_weights(tied: bool, tmp_path: Path) -> None:
    packed, meant, form = tmp_path / "packed", tmp_path / "meant", FORMATS["compressed-w4a16-zeros"]
    write(packed, packed_models.dense(tied=tied), form, heads=True, tables=True).save_pretrained(meant)
    group = {**form.settings["config_groups"]["group_0"], "targets": ["Linear", "Embedding"]}
    settings = {**form.settings, "config_groups": {"group_0": group}, "ignore": []}
    packed_models.change_config(packed, quantization_config=settings)
    ours, plain = (executor_for(folder, dtype="bfloat16") for folder in (packed, meant))
    assert ours.facts.weight_bytes < plain.facts.weight_bytes / 2
    for lengths in (LENGTHS, LONG):
        assert difference(distributions(ours, lengths), distributions(plain, lengths)) < 0.05


@pytest.mark.parametrize("name", ["fp8-blocks", "awq"])
def test_sleeping_and_waking_keeps_packed_weights(name: str, tmp_path: Path) -> None:
    write(tmp_path, packed_models.dense(), FORMATS[name])
    executor = executor_for(tmp_path, dtype="bfloat16")
    before = distributions(executor, LENGTHS)
    executor.sleep(1)
    executor.wake(None)
    assert distributions(executor, LENGTHS) == before


EXPERTS = [
    "fp8-blocks-across-parts",
    "fp8-tensor",
    "compressed-fp8-channel",
    "gptq-zeros",
    "gptq-order",
    "awq",
    "compressed-w4a16",
    "bitsandbytes-nf4",
]


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_have_the_distributions_of_their_dequantized_weights(name: str, tmp_path: Path) -> None:
    packed, meant = tmp_path / "packed", tmp_path / "meant"
    write(packed, packed_models.qwen3_moe(), ALL[name]).save_pretrained(meant)
    ours, plain = (executor_for(folder, dtype="bfloat16") for folder in (packed, meant))
    assert "unquantized" not in ours.facts.weight_format
    assert difference(distributions(ours, LENGTHS), distributions(plain, LENGTHS)) < 0.05
    assert difference(distributions(ours, LONG), distributions(plain, LONG)) < (0.3 if "fp8" in name else 0.05)


def test_experts_of_gpt_oss_have_the_distributions_of_their_dequantized_weights(tmp_path: Path) -> None:
    packed, meant = tmp_path / "packed", tmp_path / "meant"
    packed_models.write_gpt_oss(packed, packed_models.gpt_oss()).save_pretrained(meant)
    ours, plain = (executor_for(folder, dtype="bfloat16") for folder in (packed, meant))
    assert "mxfp4" in ours.facts.weight_format
    for lengths in (LENGTHS, LONG):
        assert difference(distributions(ours, lengths), distributions(plain, lengths)) < 0.05


def test_experts_rounded_at_load_have_nearly_the_distributions_of_the_checkpoint(tmp_path: Path) -> None:
    packed_models.qwen3_moe().save_pretrained(tmp_path)
    ours = executor_for(tmp_path, dtype="bfloat16", quantization="fp8")
    assert "rounded at load" in ours.facts.weight_format
    plain = executor_for(tmp_path, dtype="bfloat16")
    for lengths in (LENGTHS, LONG):
        assert difference(distributions(ours, lengths), distributions(plain, lengths)) < 0.3


@pytest.mark.parametrize("name", ["fp8-blocks-across-parts", "awq"])
def test_batch_invariant_experts_have_the_same_bits_alone_and_in_a_batch(name: str, tmp_path: Path) -> None:
    write(tmp_path, packed_models.qwen3_moe(), FORMATS[name])
    executor = executor_for(tmp_path, dtype="bfloat16", batch_invariant=True)
    together = distributions(executor, LENGTHS + LONG)
    numbers = np.random.default_rng(3)
    for length, expected in zip(LENGTHS + LONG, together, strict=True):
        prompt = numbers.integers(3, 160, size=length).tolist()
        (alone,) = generate(engine_over(executor), [prompt], 2, ASKING)
        first = alone.logprobs[0]
        assert dict(zip(first.top_token_ids, first.top_logprobs, strict=True)) == expected


def test_experts_without_kernels_are_refused_by_name(tmp_path: Path) -> None:
    model = packed_models.with_experts()
    write(tmp_path, model, FORMATS["fp8-blocks-across-parts"])
    with pytest.raises(ServiceError, match=r"has no kernels for experts in fp8_e4m3 .* whose gates and ups share no"):
        executor_for(tmp_path, dtype="bfloat16")
