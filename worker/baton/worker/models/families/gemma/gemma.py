"""Gemma 1: Llama's layers with GELU, norms that keep the weight's distance from 1, and scaled embeddings."""

from __future__ import annotations

from dataclasses import replace

from baton.worker.layers.spec import LayerSpec, NormSpec
from baton.worker.models.config import ModelConfig
from baton.worker.models.fields import Fields
from baton.worker.models.names import TensorNames
from baton.worker.models.reading import (
    Family,
    read_activation,
    read_attention,
    read_mlp,
    read_model,
    read_num_layers,
)

ARCHITECTURE = "GemmaForCausalLM"


def read(fields: Fields) -> ModelConfig:
    """Reads a config whose layers are all alike."""
    bias = fields.flag("attention_bias", default=False)
    attention = replace(read_attention(with_head_dim(fields)), qkv_bias=bias, o_bias=bias)
    activation = read_activation(fields, default="gelu_pytorch_tanh")
    # The first configs say gelu; the models were trained with its approximation.
    mlp = read_mlp(fields, "gelu_tanh" if activation == "gelu" else activation)
    return read_around(fields, ARCHITECTURE, [LayerSpec(attention, mlp)] * read_num_layers(fields))


def with_head_dim(fields: Fields) -> Fields:
    """Returns fields with a head_dim. Raises InvalidRequest for attention that is not causal."""
    if fields.flag("use_bidirectional_attention", default=False):
        raise fields.error("use_bidirectional_attention", "false")
    return Fields({**fields.raw, "head_dim": fields.positive_int("head_dim", default=256)}, fields.source)


def read_around(
    fields: Fields,
    architecture: str,
    layers: list[LayerSpec],
    *,
    names: TensorNames = TensorNames(),  # noqa: B008 - frozen
    cap: float = 0.0,
) -> ModelConfig:
    """Reads the rest of the config around the layers."""
    return read_model(
        fields,
        architecture,
        layers,
        names=names,
        norm=NormSpec(fields.positive_float("rms_norm_eps", default=1e-6), offset=1.0),
        embedding_scale=fields.positive_int("hidden_size") ** 0.5,
        logits_soft_cap=cap,
        default_tied=True,
    )


FAMILY = Family(ARCHITECTURE, "gemma", read)
