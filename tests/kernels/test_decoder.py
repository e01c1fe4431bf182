"""A decoder on a GPU, in Triton's interpreter, equals the same decoder on a CPU, whatever its layers have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from support.engine.rigs.decoder_rig import MAX_LEN, STEPS, Cpu, Gpu

from baton.worker.executors.cuda.steps.piecewise import Pieces
from baton.worker.models.config import ModelConfig
from baton.worker.models.decoder import Decoder
from baton.worker.models.registry import parse_config
from baton.worker.models.weights import ModelWeights
from baton.worker.weights.build import dummy_weights

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "initializer_range": 0.2,
}
BIASED = {"attention_bias": True, "mlp_bias": True}
SCALES = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.4,
    "logits_scaling": 5.0,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24}
YARN = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4, "mscale": 0.7, "mscale_all_dim": 1.0}
# Configs that ask for every part that layers have.
MODELS: Mapping[str, Mapping[str, Any]] = {
    "LlamaForCausalLM": BIASED,
    "Phi3ForCausalLM": {"sliding_window": 6},
    "Qwen3ForCausalLM": {},
    "GraniteForCausalLM": SCALES,
    "Olmo2ForCausalLM": {},
    "Glm4ForCausalLM": {},
    "CohereForCausalLM": {"use_qk_norm": True},
    "OlmoForCausalLM": {"clip_qkv": 0.3},
    "Gemma2ForCausalLM": {"sliding_window": 6, "query_pre_attn_scalar": 2, "attn_logit_softcapping": 0.5},
    "Gemma3ForCausalLM": {"sliding_window": 6, "sliding_window_pattern": 2},
    "GPT2LMHeadModel": {"n_positions": 64},
    "Ministral3ForCausalLM": {
        "rope_parameters": {
            "type": "yarn",
            "factor": 2.0,
            "original_max_position_embeddings": 4,
            "llama_4_scaling_beta": 0.5,
        }
    },
    "GPTNeoXForCausalLM": {"num_attention_heads": 1},
    "Qwen3MoeForCausalLM": {**EXPERTS, "num_experts": 4},
    "DeepseekV2ForCausalLM": {**LATENT, **EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1},
    "DeepseekV3ForCausalLM": {**LATENT, "q_lora_rank": 16, **EXPERTS, "n_routed_experts": 4, "rope_parameters": YARN},
    "Glm4MoeForCausalLM": {**EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1},
}


CASES = [
    *((architecture, "plain") for architecture in MODELS),
    *((architecture, "invariant") for architecture in ("LlamaForCausalLM", "GraniteForCausalLM", "Olmo2ForCausalLM")),
    *((architecture, "pieces") for architecture in ("LlamaForCausalLM", "Olmo2ForCausalLM", "DeepseekV2ForCausalLM")),
    ("Gemma2ForCausalLM", "windows apart"),
    ("Gemma3ForCausalLM", "windows apart in pieces"),
]


class Interpreted(Pieces):
    """Pieces that launch segments instead of replaying them."""

    def replay(self, index: int) -> None:
        self.launch(self._size, index)


def random_weights(config: ModelConfig) -> ModelWeights:
    """Vectors too: a norm that is left out shows."""
    weights = dummy_weights(config, torch.float32)
    return weights.mapped(lambda tensor: torch.randn_like(tensor) * 0.3 + 1 if tensor.dim() == 1 else tensor)


@pytest.mark.interpreted
@pytest.mark.filterwarnings("ignore:invalid value encountered in divide:RuntimeWarning")
@pytest.mark.parametrize(("architecture", "mode"), CASES)
def test_a_gpus_decoder_equals_a_cpus(architecture: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    config = parse_config({**SHAPE, **MODELS[architecture], "architectures": [architecture]}, architecture)
    weights, tokens = random_weights(config), torch.randint(24, (2, MAX_LEN))
    apart = mode.startswith("windows apart")
    cpu = Cpu(config, weights, tokens)
    gpu = Gpu(config, weights, tokens, batch_invariant=mode == "invariant", apart=apart)
    assert isinstance(gpu.decoder, Decoder)
    assert len(gpu.tables) == 1 + apart
    num_groups = len(gpu.tables)
    pieces = None
    if mode.endswith("pieces"):
        pieces = Interpreted(gpu.decoder, config, 64, torch.float32, CPU, num_groups)
    with torch.inference_mode():
        for num_decodes, chunks in STEPS:
            expected = cpu.forward(num_decodes, chunks)
            found = gpu.forward(num_decodes, chunks, pieces)
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(gpu.decoder.logits(found), cpu.decoder.logits(expected), atol=1e-4, rtol=1e-4)
    if not apart:
        torch.testing.assert_close(gpu.cache, cpu.cache[:, :-1], atol=1e-4, rtol=1e-4)
