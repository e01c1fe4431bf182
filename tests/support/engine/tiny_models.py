"""Small random models in Hugging Face form, and their output in Transformers, the worker's oracle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from support.engine.tiny_moe_models import LATENT_SHAPE, MOE_MODELS
from support.engine.tiny_shape import SHAPE, VOCAB_SIZE
from support.engine.tiny_state_models import STATE_MODELS
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    Cohere2ForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    Glm4Config,
    Glm4ForCausalLM,
    GlmConfig,
    GlmForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MiniCPM3Config,
    MiniCPM3ForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    MinistralConfig,
    MinistralForCausalLM,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    OlmoConfig,
    OlmoForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
    YoutuConfig,
    YoutuForCausalLM,
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

_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
_GEMMA = {"pad_token_id": 0, "head_dim": 24, "query_pre_attn_scalar": 11, "sliding_window": 9}
_CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
_GPT2 = {"vocab_size": VOCAB_SIZE, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512}
_WITHOUT_GROUPS = {key: value for key, value in SHAPE.items() if key != "num_key_value_heads"}

_SCALED_QUERIES = _rope("yarn", factor=4.0, original_max_position_embeddings=16, llama_4_scaling_beta=0.3)

_TOWER = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
_VISION = {"vision_config": {**_TOWER, "image_size": 32, "patch_size": 16}, "image_token_index": 0}

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


def _phi3_longrope(original_length: int) -> PreTrainedModel:
    """Returns a model for which all sequences of at least 3 tokens are short, or all are long."""
    factors = {
        "short_factor": [1.0 + 0.2 * pair for pair in range(8)],
        "long_factor": [9.0 - pair for pair in range(8)],
    }
    more = {"pad_token_id": 0, "original_max_position_embeddings": original_length}
    return Phi3ForCausalLM(Phi3Config(**SHAPE, **more, rope_parameters=_rope("longrope", **factors)))


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
    **STATE_MODELS,
    "youtu": lambda: YoutuForCausalLM(YoutuConfig(**LATENT_SHAPE)),
    "minicpm3": lambda: MiniCPM3ForCausalLM(MiniCPM3Config(**LATENT_SHAPE, dim_model_base=16)),
    "minicpm3-long": lambda: MiniCPM3ForCausalLM(
        MiniCPM3Config(
            **LATENT_SHAPE,
            scale_depth=None,
            rope_parameters=_rope(
                "longrope",
                short_factor=[1.0 + pair / 4 for pair in range(4)],
                long_factor=[2.0 + pair for pair in range(4)],
                original_max_position_embeddings=512,
            ),
        )
    ),
    "cohere": lambda: CohereForCausalLM(CohereConfig(**SHAPE, pad_token_id=0, logit_scale=0.3)),
    "cohere-normed": lambda: CohereForCausalLM(CohereConfig(**SHAPE, use_qk_norm=True, attention_bias=True)),
    "cohere2": lambda: Cohere2ForCausalLM(Cohere2Config(**SHAPE, pad_token_id=0, sliding_window=9, layer_types=_TYPES)),
    "olmo": lambda: OlmoForCausalLM(OlmoConfig(**SHAPE, clip_qkv=1.5)),
    "gemma": lambda: GemmaForCausalLM(GemmaConfig(**SHAPE, pad_token_id=0, head_dim=24)),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**SHAPE, **_GEMMA, **_CAPS, attn_implementation="eager")),
    "gemma3_text": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(**SHAPE, **_GEMMA, layer_types=_TYPES, rope_parameters=_TWO_ROPES, final_logit_softcapping=3.0)
    ),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**_GPT2, n_inner=96, scale_attn_by_inverse_layer_idx=True)),
    "gpt_neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**_WITHOUT_GROUPS)),
    "gpt_neox-serial": lambda: GPTNeoXForCausalLM(
        GPTNeoXConfig(**_WITHOUT_GROUPS, use_parallel_residual=False, attention_bias=False, tie_word_embeddings=True)
    ),
    "starcoder2": lambda: Starcoder2ForCausalLM(Starcoder2Config(**SHAPE, sliding_window=9)),
    "llama-dynamic-rope": lambda: _llama(rope_parameters=_rope("dynamic", factor=4.0)),
    "phi3-long": lambda: _phi3_longrope(original_length=2),
    "phi3-short": lambda: _phi3_longrope(original_length=512),
    "ministral": lambda: MinistralForCausalLM(
        MinistralConfig(**SHAPE, head_dim=24, sliding_window=9, layer_types=_TYPES)
    ),
    "ministral3": lambda: Ministral3ForCausalLM(
        Ministral3Config(**SHAPE, head_dim=24, rope_parameters=_SCALED_QUERIES)
    ),
    "mistral3": lambda: Mistral3ForConditionalGeneration(
        Mistral3Config(text_config=MistralConfig(**SHAPE, head_dim=24), **_VISION, tie_word_embeddings=False)
    ),
    "mistral3-scaled": lambda: Mistral3ForConditionalGeneration(
        Mistral3Config(
            text_config=Ministral3Config(**SHAPE, head_dim=24, rope_parameters=_SCALED_QUERIES),
            **_VISION,
            tie_word_embeddings=False,
        )
    ),
    "gemma3": lambda: Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=Gemma3TextConfig(**SHAPE, **_GEMMA, layer_types=_TYPES), **_VISION)
    ),
}


def make_model(name: str, folder: Path, max_shard_size: str = "5GB") -> PreTrainedModel:
    """Saves the named model with random weights, including vectors. Returns it in fp32."""
    torch.manual_seed(sum(name.encode()))
    model = MODELS[name]().eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(1.0 if key.endswith("norm.weight") else 0.0, 0.2)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def load_transformers(folder: Path) -> PreTrainedModel:
    """Loads the model of a folder in fp32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def generate_greedily(model: PreTrainedModel, prompt: Sequence[int], count: int) -> list[int]:
    """Returns the tokens that Transformers appends to the prompt. Ignores end-of-sequence."""
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
    """Returns random prompts of 1 to `longest` tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in lengths]
