"""GGUF files of every architecture run as the Transformers model that they were written from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from support.engine.packed.cells import rounded
from support.engine.random_vectors import with_random_vectors
from support.engine.tiny_models import MODELS
from support.engine.tiny_shape import SHAPE
from support.gguf.files import write_gguf
from support.gguf.metadata import architecture_name
from support.gguf.runs import check_equal
from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
)

from baton.model_folder.gguf.architectures import ARCHITECTURES
from baton.rpc.errors import InvalidRequest, ServiceError
from baton.worker.weights.loading import load_model, read_config

_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3}
_NARROW = {**_EXPERTS, "moe_intermediate_size": 40}
# Files do not state the scale of scores: it follows from the size of a head.
_GEMMA = {**SHAPE, "num_hidden_layers": 6, "head_dim": 24, "query_pre_attn_scalar": 24, "sliding_window": 9}
_DEEP = {**SHAPE, "num_hidden_layers": 5}
_LINEAR = {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0}
_ROPES = {"full_attention": _LINEAR, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}

_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + pair / 4 for pair in range(8)],
    "long_factor": [2.0 + pair for pair in range(8)],
    "short_mscale": 1.2,
    "long_mscale": 1.2,
    "original_max_position_embeddings": 512,
}

Make = Callable[[], PreTrainedModel]
ROWS: dict[str, Make] = {
    **{
        name: MODELS[name]
        for name in (
            "llama",
            "llama-biased",
            "llama3-rope",
            "llama-linear-rope",
            "llama-yarn",
            "qwen2",
            "qwen3",
            "phi3",
            "phi3-partial",
            "phi3-long",
            "phi3-short",
            "gemma",
            "granite",
            "olmo2",
            "olmo3",
            "granitemoe",
            "ernie4_5_moe",
            "ernie4_5_moe-unshared",
            "cohere",
            "cohere-normed",
        )
    },
    "gemma2": lambda: Gemma2ForCausalLM(
        Gemma2Config(**_GEMMA, attn_logit_softcapping=2.0, final_logit_softcapping=3.0)
    ),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**_GEMMA, rope_parameters=_ROPES)),
    "gemma3-capped": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**_GEMMA, final_logit_softcapping=3.0)),
    # What follows is constant in files: windows, or which layers have none or no RoPE.
    "mixtral": lambda: MixtralForCausalLM(
        MixtralConfig(**SHAPE, num_local_experts=8, num_experts_per_tok=3, sliding_window=None)
    ),
    "starcoder2": lambda: Starcoder2ForCausalLM(Starcoder2Config(**SHAPE, sliding_window=None)),
    "smollm3": lambda: SmolLM3ForCausalLM(SmolLM3Config(**_DEEP, pad_token_id=0)),
    "cohere2": lambda: Cohere2ForCausalLM(Cohere2Config(**_DEEP, pad_token_id=0, sliding_window=9)),
    "qwen2moe": lambda: Qwen2MoeForCausalLM(
        Qwen2MoeConfig(**SHAPE, **_NARROW, shared_expert_intermediate_size=56, tie_word_embeddings=True)
    ),
    "qwen3moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **_NARROW, head_dim=24, norm_topk_prob=True)),
    "olmoe": lambda: OlmoeForCausalLM(OlmoeConfig(**SHAPE, **_EXPERTS)),
    "phimoe": lambda: PhimoeForCausalLM(
        PhimoeConfig(**SHAPE, num_local_experts=8, attention_bias=True, lm_head_bias=True, sliding_window=9)
    ),
    "phimoe-longrope": lambda: PhimoeForCausalLM(PhimoeConfig(**SHAPE, num_local_experts=8, rope_parameters=_LONG)),
}

# Rows of whole blocks of 32 values.
WIDE_ROWS: dict[str, Make] = {
    "qwen3moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SHAPE, **_EXPERTS, moe_intermediate_size=32, head_dim=32, norm_topk_prob=True)
    ),
    "phi3": MODELS["phi3"],
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**{**_GEMMA, "head_dim": 32, "query_pre_attn_scalar": 32})),
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", ROWS)
def test_a_file_runs_as_the_model_that_it_was_written_from(name: str, tmp_path: Path) -> None:
    model = with_random_vectors(ROWS[name], seed=3)
    check_equal(write_gguf(tmp_path / "model.gguf", model), model)


def test_every_architecture_has_a_row() -> None:
    configs = [make().config for make in ROWS.values()]
    rows = {(architecture_name(config), config.model_type) for config in configs}
    assert rows == {(one.name, one.model_type) for several in ARCHITECTURES.values() for one in several}


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("qwen2", {"qwen2__expert_count": 8}, "qwen2.expert_count is 8; GGUF files of qwen2 with experts cannot be"),
        (
            "llama",
            {"general__architecture": "granitehybrid"},
            "general.architecture is 'granitehybrid'; GGUF files can be",
        ),
        (
            "granitemoe",
            {"granitemoe__expert_shared_feed_forward_length": 64},
            "granitemoe.expert_shared_feed_forward_length is 64: GGUF files of Granite models with a shared expert",
        ),
        ("granite", {"granite__rope__scaling__finetuned": False}, "GGUF files of Granite models without RoPE cannot"),
        ("phi3", {"phi3__rope__dimension_count": 18}, "phi3.rope.dimension_count is 18; it must be at most the size"),
        (
            "llama-yarn",
            {"llama__rope__scaling__attn_factor": 1.75},
            "llama.rope.scaling.attn_factor is 1.75; it must be 1, or 1.13863 for a factor of 4",
        ),
        ("cohere", {"command-r__logit_scale": 0.0}, "command-r.logit_scale is 0.0; it must be a number above 0"),
        (
            "olmo3",
            {"olmo2__attention__sliding_window_pattern": [True]},
            "olmo2.attention.sliding_window_pattern is [True]; it must be a list of 3 flags, or a positive integer",
        ),
    ],
)
def test_what_is_not_supported_or_wrong_is_named(
    name: str, changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "model.gguf", ROWS[name](), **changed)
    with pytest.raises(ServiceError) as caught:
        read_config(str(path), "auto")
    assert str(path) in caught.value.message
    assert message in caught.value.message


def test_a_missing_expert_stack_is_named_once_for_each_expert(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", ROWS["mixtral"](), llama__block_count=4)
    with pytest.raises(InvalidRequest, match=r"no file holds the tensor blk\.3\.\w+\.weight"):
        load_model(str(path), "auto", torch.float32)


def test_files_without_newer_keys_are_read(tmp_path: Path) -> None:
    model = with_random_vectors(ROWS["qwen2moe"], seed=3)
    model.config.intermediate_size = 3 * 40  # which older files state alone
    without = ["qwen2moe.expert_feed_forward_length"]
    check_equal(write_gguf(tmp_path / "model.gguf", model, without=without), model)


@pytest.mark.parametrize("name", ["qwen3moe", "phi3", "gemma2"])
def test_quantized_files_are_dequantized_as_the_library_does(name: str, tmp_path: Path) -> None:
    """Compares with the model whose weights the library has quantized and dequantized."""
    model = with_random_vectors(WIDE_ROWS[name], seed=3)
    path = write_gguf(tmp_path / "model.gguf", model, Kind.Q8_0)
    check_equal(path, rounded(model, Kind.Q8_0))
