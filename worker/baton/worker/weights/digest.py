"""Identifies a model in 16 bytes: equal for equal weights, however they are split into files. Reads samples of them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from baton.worker.layers.latent_spec import LatentSpec
from baton.worker.layers.rope_config import RopeConfig
from baton.worker.layers.spec import AttentionSpec, ExpertsSpec, LayerSpec, MlpSpec, NormSpec
from baton.worker.models.config import ModelConfig
from baton.worker.weights.tensors import Tensors

DIGEST_BYTES = 16
# What earlier versions assume.
_LATER_ROPE: Mapping[str, Any] = {
    "rotary_dim": 0,
    "interleaved": False,
    "factors": (),
    "long_factors": (),
    "query_beta": 0.0,
}
_SAMPLES = 4  # a tensor
_SAMPLE_BYTES = 64


def model_digest(config: ModelConfig, checkpoint: Tensors) -> bytes:
    """Hashes the config and every tensor's name, type, shape and sampled bytes."""
    hasher = _config_hasher(config)
    for name in checkpoint.names:
        entry = checkpoint.entry(name)
        hasher.update(f"{name}:{entry.dtype}:{entry.shape}".encode())
        for sample in range(_SAMPLES):
            offset = (entry.num_bytes - min(_SAMPLE_BYTES, entry.num_bytes)) * sample // (_SAMPLES - 1)
            hasher.update(checkpoint.sample(name, offset, _SAMPLE_BYTES))
    return hasher.digest()


def dummy_digest(config: ModelConfig, seed: int, device_type: str = "cpu") -> bytes:
    """Hashes the config of dummy weights, which differ between types of devices."""
    hasher = _config_hasher(config)
    hasher.update(f"dummy:{seed}:{device_type}:{config.initializer_range!r}".encode())
    return hasher.digest()


def kv_facts(config: ModelConfig) -> dict[str, Any]:
    """Returns the properties that change the KV of a token, by name.

    Workers of other versions must compute equal hashes. So the names and values in this function never change, and
    properties of later versions are omitted if they have the value that earlier versions assume.
    """
    first = config.layers[0]
    attention = config.attention
    facts = {
        "architecture": config.architecture,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": first.mlp.intermediate_size,
        "num_layers": len(config.layers),
        "num_q_heads": attention.num_q_heads,
        "num_kv_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "rms_norm_eps": config.norm.eps,
        "rope": _rope_facts(attention.rope),
        "tie_embeddings": config.tie_embeddings,
        "qkv_bias": _of_heads(attention).qkv_bias,
        "o_bias": _of_heads(attention).o_bias,
        "mlp_bias": first.mlp.bias,
        "qk_norm": _of_heads(attention).qk_norm != "none",
        "windows": config.windows,
    }
    return facts | _later_facts(config)


def _rope_facts(rope: RopeConfig) -> dict[str, Any]:
    facts = dataclasses.asdict(rope)
    return {name: value for name, value in facts.items() if name not in _LATER_ROPE or value != _LATER_ROPE[name]}


def _later_facts(config: ModelConfig) -> dict[str, Any]:
    first = config.layers[0]
    usual_scale = float(config.head_dim) ** -0.5
    heads = _of_heads(config.attention)
    found = {
        "score_scale": (config.attention.scale, usual_scale),
        "norm": (_changed(dataclasses.replace(config.norm, eps=0.0)), _changed(NormSpec(0.0))),
        "norm_of_projection": (heads.qk_norm == "projection", False),
        "norm_of_each_head": (heads.qk_norm == "each_head", False),
        "qkv_clip": (heads.qkv_clip, 0.0),
        "sinks": (heads.sinks, False),
        "soft_cap": (heads.soft_cap, 0.0),
        "activation": (_activation(first.mlp), ("silu", True)),
        "parallel": (first.parallel, False),
        "input_norms": (first.input_norms, True),
        "output_norms": (first.output_norms, False),
        "residual_scale": (first.residual_scale, 1.0),
        "embedding_scale": (config.embedding_scale, 1.0),
        "logits_divisor": (config.logits_divisor, 1.0),
        "lm_head_bias": (config.lm_head_bias, False),
        "logits_soft_cap": (config.logits_soft_cap, 0.0),
        "learned_positions": (config.learned_positions, False),
        "position_offset": (config.position_offset, 0),
        "num_token_types": (config.num_token_types, 0),
        "embedding_norm": (config.embedding_norm, False),
        "final_norm": (config.final_norm, True),
        "causal": (config.attention.causal, True),
        "sum_norms": (first.sum_norms, False),
        "experts": (_changed(first.mlp) if isinstance(first.mlp, ExpertsSpec) else {}, {}),
        "mixer": (None if heads is first.attention else _changed(first.attention), None),
        "other_layers": (_other_layers(config), {}),
        # Transformers rounds otherwise than our layers, so their KV differs.
        "weight_format": ("" if config.weight_format is None else config.weight_format.settings, ""),
        "transformers": ("" if config.transformers is None else config.transformers.raw_config, ""),
    }
    return {name: value for name, (value, assumed) in found.items() if value != assumed}


def _of_heads(attention: AttentionSpec | LatentSpec) -> AttentionSpec:
    """Returns a layer's attention; of other mixers, one of the same shape, for facts that they do not have."""
    if isinstance(attention, AttentionSpec):
        return attention
    return AttentionSpec(
        attention.num_q_heads, attention.num_kv_heads, attention.head_dim, attention.rope, attention.scale
    )


def _activation(mlp: MlpSpec | ExpertsSpec) -> tuple[str, bool]:
    return (mlp.activation, mlp.gated) if isinstance(mlp, MlpSpec) else ("silu", True)


def _other_layers(config: ModelConfig) -> Mapping[int, Any]:
    """Returns the layers that differ from layer 0 in more than the window."""
    first = _without_window(config.layers[0])
    return {index: _changed(layer) for index, layer in enumerate(config.layers) if _without_window(layer) != first}


def _changed(spec: Any) -> dict[str, Any]:
    """Returns the fields, at any depth, that do not have their defaults: a later version's fields are left out."""
    found: dict[str, Any] = {"kind": type(spec).__name__}
    for field in dataclasses.fields(spec):
        value = getattr(spec, field.name)
        if value != field.default:
            found[field.name] = _changed(value) if dataclasses.is_dataclass(value) else value
    return found


def _without_window(layer: LayerSpec) -> LayerSpec:
    if not isinstance(layer.attention, AttentionSpec):
        return layer
    return dataclasses.replace(layer, attention=dataclasses.replace(layer.attention, window=0))


def _config_hasher(config: ModelConfig) -> hashlib.blake2b:
    facts = json.dumps(kv_facts(config), sort_keys=True)
    return hashlib.blake2b(facts.encode(), digest_size=DIGEST_BYTES, person=b"baton-model")
