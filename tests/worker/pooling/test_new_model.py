"""GTE under the name of NewModel, as its checkpoints of remote code have it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engine.encoder_models import ENCODERS
from support.engine.pooled_runs import make_pooling_engine, run_pooled
from support.engine.pooling_models import make_classifier

from baton.rpc.errors import InvalidRequest
from baton.worker.core import PoolingParams, PoolingTask
from baton.worker.layers.rope import inverse_frequencies
from baton.worker.models.registry import parse_config

NEW: dict[str, Any] = {
    "architectures": ["NewModel"],
    "auto_map": {"AutoModel": "Alibaba-NLP/new-impl--modeling.NewModel"},
    "model_type": "new",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 8192,
    "layer_norm_type": "layer_norm",
    "pack_qkv": True,
    "position_embedding_type": "rope",
    "rope_theta": 20_000,
    "type_vocab_size": 0,
    "logn_attention_scale": False,
}


def test_a_classifier_under_the_old_names_has_the_same_scores(tmp_path: Path) -> None:
    model = make_classifier(ENCODERS["gte"].make(num_hidden_layers=2), tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = {name.replace("gte.", "new.", 1): tensor for name, tensor in load_file(path).items()}
    assert any(name.startswith("new.") for name in tensors)
    save_file(tensors, path, {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {"architectures": ["NewForSequenceClassification"], "model_type": "new", "auto_map": {"AutoModel": "x"}}
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_theta": rope["rope_theta"]}))
    text = list(range(5, 35))
    params = PoolingParams(PoolingTask.CLASSIFY, activation=False, reads_all=True)
    found = run_pooled(make_pooling_engine(tmp_path), [text], params)[0]
    with torch.inference_mode():
        expected = model(torch.tensor([text]), attention_mask=torch.ones(1, len(text))).logits
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-3, atol=1e-4)


def test_ntk_scaling_has_a_larger_theta_and_lower_frequencies() -> None:
    config = parse_config({**NEW, "rope_scaling": {"type": "ntk", "factor": 8.0}}, "new")
    found = inverse_frequencies(config.ropes[0], config.head_dim)
    pairs = torch.arange(0, 16, 2).float() / 16
    torch.testing.assert_close(found, 1 / (20_000 * 8.0) ** pairs / 8.0 ** (2 / 16))
    assert config.max_model_len == 8192
    assert config.num_token_types == 0


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"logn_attention_scale": True}, "logn_attention_scale"),
        ({"position_embedding_type": "absolute"}, "position_embedding_type"),
        ({"layer_norm_type": "rms_norm"}, "layer_norm_type"),
        ({"pack_qkv": False}, "pack_qkv"),
        ({"type_vocab_size": -1}, "type_vocab_size"),
        ({"rope_scaling": {"type": "ntk", "factor": 2.0, "mixed_b": 0.6}}, "mixed_b"),
        ({"rope_scaling": {"type": "other", "factor": 2.0}}, "type"),
    ],
)
def test_what_is_not_computed_is_named(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        parse_config({**NEW, **changed}, "new")


def test_weights_in_a_format_are_refused() -> None:
    # The tensor of gates and up projections is swapped at the end of a load, which packed weights do not allow.
    from baton.worker.layers.linear import LinearWeights
    from baton.worker.weights.build import _put_gates_first

    class Packed:
        name = "awq"

    with pytest.raises(InvalidRequest, match="format awq"):
        _put_gates_first(LinearWeights(Packed(), {}))
