"""Quantized models on a GPU have nearly the distribution of the weights that the packed ones mean."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.engine import packed_models
from support.engine.gpu_engines import engine_over, executor_for, generate
from support.engine.packed_models import FORMATS, write

from baton.rpc.errors import ServiceError
from baton.worker.core import SamplingParams
from baton.worker.executors.base import Executor

pytestmark = pytest.mark.gpu

# A format of each kernel, and of parts that are kept apart.
NAMES = [
    "fp8-tensor",
    "fp8-blocks-across-parts",
    "compressed-fp8-channel",
    "compressed-int8-zeros",
    "compressed-w4a16-order",
    "compressed-mxfp4",
    "gptq-zeros",
    "awq",
    "modelopt-nvfp4",
]
ASKING = SamplingParams(temperature=0.0, logprobs=20)
# Up to 64 tokens are not rounded; the long prompt is, in 8 bits.
LENGTHS, LONG = (3, 17, 40), (200,)


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
    write(packed, packed_models.dense(), FORMATS[name]).save_pretrained(meant)
    ours, plain = (executor_for(folder, dtype="bfloat16") for folder in (packed, meant))
    assert "unquantized" not in ours.facts.weight_format
    assert difference(distributions(ours, LENGTHS), distributions(plain, LENGTHS)) < 0.05
    assert difference(distributions(ours, LONG), distributions(plain, LONG)) < (0.3 if "fp8" in name else 0.05)


@pytest.mark.parametrize("name", ["fp8-blocks", "awq"])
def test_sleeping_and_waking_keeps_packed_weights(name: str, tmp_path: Path) -> None:
    write(tmp_path, packed_models.dense(), FORMATS[name])
    executor = executor_for(tmp_path, dtype="bfloat16")
    before = distributions(executor, LENGTHS)
    executor.sleep(1)
    executor.wake(None)
    assert distributions(executor, LENGTHS) == before


def test_packed_experts_are_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path, packed_models.with_experts(), FORMATS["awq"])
    with pytest.raises(ServiceError, match="has experts, whose weights executor=cuda does not compute in the format"):
        executor_for(tmp_path, dtype="bfloat16")
