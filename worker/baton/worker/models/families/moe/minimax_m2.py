"""MiniMax-M2: experts in every layer; queries and keys are normed over all heads, and a part of each head rotates."""

from __future__ import annotations

from dataclasses import replace

from baton.worker.layers.spec import ExpertsSpec, LayerSpec
from baton.worker.models.config import ModelConfig
from baton.worker.models.fields import Fields
from baton.worker.models.names import TensorNames
from baton.worker.models.reading import Family, read_attention, read_mlp, read_model, read_num_layers
from baton.worker.models.reading_experts import W_NAMES, read_router
from baton.worker.models.reading_rope import RopeDefaults, read_rope
from baton.worker.models.reading_sizes import read_head_dim

ARCHITECTURE = "MiniMaxM2ForCausalLM"
_NAMES = TensorNames(
    router="block_sparse_moe.gate",
    router_correction="block_sparse_moe.e_score_correction_bias",
    experts=W_NAMES,
)


def read(fields: Fields) -> ModelConfig:
    """Reads a config whose layers are all alike."""
    head_dim = read_head_dim(fields)
    partial = fields.positive_int("rotary_dim", default=head_dim) / head_dim
    attention = read_attention(fields, read_rope(fields, RopeDefaults(theta=5e6, partial=partial)))
    attention = replace(attention, qk_norm="projection")
    router = replace(read_router(fields, ("num_local_experts",)), score="sigmoid", corrected=True, renormalized=True)
    layer = LayerSpec(attention, ExpertsSpec(router, read_mlp(fields).intermediate_size))
    return read_model(fields, ARCHITECTURE, [layer] * read_num_layers(fields), names=_NAMES)


FAMILY = Family(ARCHITECTURE, "minimax_m2", read, ignores_auto_map=True)
