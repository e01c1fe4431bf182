"""DeepSeek-V3, V3.1, R1 and Kimi K2: V2's attention, and experts chosen by sigmoid and a bias in the best groups."""

from __future__ import annotations

from baton.worker.layers.spec import ExpertsSpec
from baton.worker.models.config import ModelConfig
from baton.worker.models.fields import Fields
from baton.worker.models.reading import Family, read_model
from baton.worker.models.reading_experts import check_silu, read_grouped_router
from baton.worker.models.reading_latent import read_dense_first, read_latent_attention, read_shared

ARCHITECTURE = "DeepseekV3ForCausalLM"


def read(fields: Fields) -> ModelConfig:
    """Reads layers of which the first are dense. For the MTP layer see baton.worker.models.mtp."""
    check_silu(fields)
    for key, only in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if fields.text(key, default=only) != only:
            raise fields.error(key, only)
    size = fields.positive_int("moe_intermediate_size")
    router = read_grouped_router(fields, ("n_routed_experts",))
    experts = ExpertsSpec(router, size, router_in_fp32=True, shared=read_shared(fields, size, 1))
    attention = read_latent_attention(fields, interleaved=fields.flag("rope_interleave", default=True))
    return read_model(fields, ARCHITECTURE, read_dense_first(fields, attention, experts, default=3))


FAMILY = Family(ARCHITECTURE, "deepseek_v3", read, ignores_auto_map=True)
