"""OLMoE without clipped queries, keys and values: experts in every layer; QK norms span all heads."""

from __future__ import annotations

from dataclasses import replace

from baton.worker.layers.spec import ExpertsSpec, LayerSpec
from baton.worker.models.config import ModelConfig
from baton.worker.models.fields import Fields
from baton.worker.models.reading import Family, read_attention, read_mlp, read_model, read_num_layers
from baton.worker.models.reading_experts import read_router

ARCHITECTURE = "OlmoeForCausalLM"


def read(fields: Fields) -> ModelConfig:
    """Reads a config whose layers are all alike. Raises InvalidRequest for clipped queries, keys and values."""
    if fields.raw.get("clip_qkv") is not None:
        raise fields.error("clip_qkv", "null")
    bias = fields.flag("attention_bias", default=False)
    attention = replace(read_attention(fields), qkv_bias=bias, o_bias=bias, qk_norm="projection")
    router = replace(read_router(fields), renormalized=fields.flag("norm_topk_prob", default=False))
    layer = LayerSpec(attention, ExpertsSpec(router, read_mlp(fields).intermediate_size))
    return read_model(fields, ARCHITECTURE, [layer] * read_num_layers(fields), default_eps=1e-5)


FAMILY = Family(ARCHITECTURE, "olmoe", read)
