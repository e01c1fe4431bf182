"""GLM-4.7-Flash: the latent attention of DeepSeek-V3, and its experts in layers that the config lists."""

from __future__ import annotations

from baton.worker.layers.spec import ExpertsSpec, LayerSpec
from baton.worker.models.config import ModelConfig
from baton.worker.models.fields import Fields
from baton.worker.models.reading import Family, read_mlp, read_model, read_num_layers
from baton.worker.models.reading_experts import check_silu, read_grouped_router, read_sparse_kinds
from baton.worker.models.reading_latent import read_latent_attention, read_shared

ARCHITECTURE = "Glm4MoeLiteForCausalLM"


def read(fields: Fields) -> ModelConfig:
    """Reads layers that differ in their MLPs. For the MTP layer see baton.worker.models.mtp."""
    check_silu(fields)
    size = fields.positive_int("moe_intermediate_size")
    router = read_grouped_router(fields, ("n_routed_experts",))
    experts = ExpertsSpec(router, size, router_in_fp32=True, shared=read_shared(fields, size, 1))
    attention = read_latent_attention(fields, interleaved=fields.flag("rope_interleave", default=True))
    layers = [
        LayerSpec(attention, experts if sparse else read_mlp(fields))
        for sparse in read_sparse_kinds(fields, read_num_layers(fields))
    ]
    return read_model(fields, ARCHITECTURE, layers, default_eps=1e-5)


FAMILY = Family(ARCHITECTURE, "glm4_moe_lite", read)
