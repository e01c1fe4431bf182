"""Small random models in Hugging Face form, and what Transformers generates with them: the worker's oracle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from support.engine.tiny_moe_models import MOE_MODELS
from support.engine.tiny_shape import SHAPE, VOCAB_SIZE
from transformers import (
    AutoModelForCausalLM,
    Glm4Config,
    Glm4ForCausalLM,
    GlmConfig,
    GlmForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)


def _llama(**more: Any) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SHAPE, **more))


def _rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10000.0, **more}


_LLAMA3 = _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)

_TWO_ROPES = {
    "full_attention": _rope("yarn", factor=4.0, original_max_position_embeddings=128),
    "sliding_attention": _rope("default"),
}

_SCALES = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.4,
    "logits_scaling": 5.0,
    "attention_bias": True,
}


def _granite4(**more: Any) -> PreTrainedModel:
    kinds = ["full_attention"] * 3
    shape = {"shared_intermediate_size": 80, "num_local_experts": 0, "layer_types": kinds, "mamba_n_heads": 4}
    return GraniteMoeHybridForCausalLM(GraniteMoeHybridConfig(**SHAPE, **_SCALES, **shape, **more))


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": _llama,
    "llama-biased": lambda: _llama(attention_bias=True, mlp_bias=True, tie_word_embeddings=True, head_dim=24),
    "llama3-rope": lambda: _llama(rope_parameters=_LLAMA3),
    "llama-linear-rope": lambda: _llama(rope_parameters=_rope("linear", factor=3.0)),
    "llama-yarn": lambda: _llama(rope_parameters=_rope("yarn", factor=4.0, original_max_position_embeddings=128)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=None)),
    "mistral-window": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=11)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=True)),
    "qwen2-window": lambda: Qwen2ForCausalLM(
        Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=9, max_window_layers=2)
    ),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=32)),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**SHAPE, pad_token_id=0, sliding_window=13)),
    "granite": lambda: GraniteForCausalLM(GraniteConfig(**SHAPE, **_SCALES)),
    "granitemoehybrid": lambda: _granite4(position_embedding_type="rope"),
    "granitemoehybrid-nope": lambda: _granite4(position_embedding_type="nope"),
    "olmo2": lambda: Olmo2ForCausalLM(Olmo2Config(**SHAPE, attention_bias=True)),
    "olmo3": lambda: Olmo3ForCausalLM(
        Olmo3Config(**SHAPE, pad_token_id=0, sliding_window=9, rope_parameters=_TWO_ROPES)
    ),
    "smollm3": lambda: SmolLM3ForCausalLM(SmolLM3Config(**SHAPE, pad_token_id=0, no_rope_layer_interval=2)),
    "smollm3-window": lambda: SmolLM3ForCausalLM(
        SmolLM3Config(**SHAPE, pad_token_id=0, no_rope_layers=[0, 1, 1], use_sliding_window=True, sliding_window=9)
    ),
    "glm": lambda: GlmForCausalLM(GlmConfig(**SHAPE, pad_token_id=0, head_dim=24)),
    "glm4": lambda: Glm4ForCausalLM(Glm4Config(**SHAPE, pad_token_id=0, head_dim=16)),
    "phi3-partial": lambda: Phi3ForCausalLM(Phi3Config(**SHAPE, pad_token_id=0, partial_rotary_factor=0.75)),
    **MOE_MODELS,
}


def make_model(name: str, folder: Path, max_shard_size: str = "5GB") -> PreTrainedModel:
    """Saves the named model with random weights, vectors included, and returns it in fp32."""
    torch.manual_seed(sum(name.encode()))
    model = MODELS[name]().eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(1.0 if key.endswith("norm.weight") else 0.0, 0.2)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def load_transformers(folder: Path) -> PreTrainedModel:
    """The model of a folder in fp32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def generate_greedily(model: PreTrainedModel, prompt: Sequence[int], count: int) -> list[int]:
    """What Transformers appends to the prompt, end-of-sequence ignored."""
    token_ids = torch.tensor([list(prompt)])
    with torch.no_grad():
        generated = model.generate(
            token_ids,
            attention_mask=torch.ones_like(token_ids),
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            max_new_tokens=count,
            eos_token_id=None,
            pad_token_id=0,
        )
    return generated[0, len(prompt) :].tolist()


def prompts(count: int, longest: int, vocab_size: int = VOCAB_SIZE, seed: int = 0) -> list[list[int]]:
    """Random prompts of 1 to `longest` tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in lengths]
