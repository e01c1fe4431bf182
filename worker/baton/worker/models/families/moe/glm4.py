"""GLM-4.5 to 4.7, some layers are dense, others have groups of experts."""

from __future__ import annotations

from dataclasses import replace

from baton.worker.layers.spec import AttentionSpec, ExpertsSpec, LayerSpec, MlpSpec
from baton.worker.models.config import ModelConfig
from baton.worker.models.fields import Fields
from baton.worker.models.reading import Family, read_attention, read_mlp, read_model, read_num_layers
from baton.worker.models.reading_experts import read_grouped_router
from baton.worker.models.reading_rope import RopeDefaults, read_rope

ARCHITECTURE = "Glm4MoeForCausalLM"


def read(fields: Fields) -> ModelConfig:
    """Reads layers that differ in their MLPs. For the MTP layer see baton.worker.models.mtp."""
    attention, num_layers = _read_attention(fields), read_num_layers(fields)
    size = fields.positive_int("moe_intermediate_size")
    num_shared = fields.positive_int("n_shared_experts", default=1)
    experts = ExpertsSpec(
        read_grouped_router(fields, ("n_routed_experts",)),
        size,
        router_in_fp32=True,
        shared=MlpSpec(num_shared * size),
    )
    num_dense = fields.number("first_k_dense_replace", default=1)
    dense = read_mlp(fields)
    layers = [LayerSpec(attention, dense if layer < num_dense else experts) for layer in range(num_layers)]
    return read_model(fields, ARCHITECTURE, layers, default_eps=1e-5)


def _read_attention(fields: Fields) -> AttentionSpec:
    attention = read_attention(fields, read_rope(fields, RopeDefaults(partial=0.5)))
    return replace(
        attention,
        qkv_bias=fields.flag("attention_bias", default=False),
        qk_norm="head" if fields.flag("use_qk_norm", default=False) else "none",
    )


FAMILY = Family(ARCHITECTURE, "glm4_moe", read)
