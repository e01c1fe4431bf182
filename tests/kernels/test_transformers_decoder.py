"""A model of Transformers over the kernels of a GPU, in Triton's interpreter, equals the same model over a CPU's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from support.engine.rigs.decoder_rig import MAX_LEN, STEPS, Cpu, Gpu

from baton.worker.models.registry import parse_config
from baton.worker.models.transformers_backend.weights import TransformersWeights
from baton.worker.weights.transformers_loading import dummy_with_transformers

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "max_position_embeddings": MAX_LEN,
}
WINDOWS = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
# RoPE with norms of each head, learned positions, soft caps and windows, sinks, and a layer that rotates nothing.
MODELS: Mapping[str, Mapping[str, Any]] = {
    "ApertusForCausalLM": {},
    "GPTBigCodeForCausalLM": {"num_attention_heads": 1, "n_inner": 32, "n_positions": MAX_LEN},
    "VaultGemmaForCausalLM": {**WINDOWS, "attn_logit_softcapping": 0.5},
    "GraniteSWAForCausalLM": WINDOWS,
    "CwmForCausalLM": WINDOWS,
}


@pytest.mark.interpreted
@pytest.mark.filterwarnings("ignore:invalid value encountered in divide:RuntimeWarning")
@pytest.mark.parametrize("architecture", MODELS)
def test_a_gpus_model_equals_a_cpus(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    raw = {**SHAPE, **MODELS[architecture], "architectures": [architecture]}
    config = parse_config(raw, architecture, "transformers")

    def weights() -> TransformersWeights:
        return dummy_with_transformers(config, torch.float32, 0, CPU)

    tokens = torch.randint(32, (2, MAX_LEN))
    cpu, gpu = Cpu(config, weights(), tokens), Gpu(config, weights(), tokens, batch_invariant=False)
    with torch.inference_mode():
        for num_decodes, chunks in STEPS:
            expected, found = cpu.forward(num_decodes, chunks), gpu.forward(num_decodes, chunks)
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(gpu.decoder.logits(found), cpu.decoder.logits(expected), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(gpu.cache, cpu.cache[:, :-1], atol=1e-4, rtol=1e-4)
