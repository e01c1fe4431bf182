"""DeepSeek-V2 and V2-Lite: multi-head latent attention, and experts chosen by softmax, all or of the best groups."""

from __future__ import annotations

from dataclasses import replace

from baton.kernels.routing import RouterSpec
from baton.worker.layers.spec import ExpertsSpec
from baton.worker.models.config import ModelConfig
from baton.worker.models.fields import Fields
from baton.worker.models.reading import Family, read_model
from baton.worker.models.reading_experts import check_silu, read_router, with_groups
from baton.worker.models.reading_latent import read_dense_first, read_latent_attention, read_shared

ARCHITECTURE = "DeepseekV2ForCausalLM"
_METHODS = ("greedy", "group_limited_greedy")


def read(fields: Fields) -> ModelConfig:
    """Reads layers of which the first may be dense."""
    check_silu(fields)
    size = fields.positive_int("moe_intermediate_size")
    experts = ExpertsSpec(_read_router(fields), size, router_in_fp32=True, shared=read_shared(fields, size, 2))
    layers = read_dense_first(fields, read_latent_attention(fields), experts, default=0)
    return read_model(fields, ARCHITECTURE, layers)


def _read_router(fields: Fields) -> RouterSpec:
    if fields.text("scoring_func", default="softmax") != "softmax":
        raise fields.error("scoring_func", "softmax")
    if fields.flag("norm_topk_prob", default=False):
        raise fields.error("norm_topk_prob", "false")
    router = replace(
        read_router(fields, ("n_routed_experts",)), scale=fields.positive_float("routed_scaling_factor", default=1.0)
    )
    method = fields.text("topk_method", default="greedy")
    if method not in _METHODS:
        raise fields.error("topk_method", f"one of {', '.join(_METHODS)}")
    return router if method == "greedy" else replace(with_groups(fields, router), best_of_group=1)


FAMILY = Family(ARCHITECTURE, "deepseek_v2", read, ignores_auto_map=True)
