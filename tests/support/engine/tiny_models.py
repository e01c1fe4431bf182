"""Small random models in Hugging Face form, and what Transformers generates with them: the worker's oracle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB_SIZE = 160
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _llama(**more: Any) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SHAPE, **more))


def _rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10000.0, **more}


_LLAMA3 = _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)

_SCALES = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.4,
    "logits_scaling": 5.0,
    "attention_bias": True,
}

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
    "olmo2": lambda: Olmo2ForCausalLM(Olmo2Config(**SHAPE, attention_bias=True)),
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
