"""MiniCPM3: latent attention that rotates halves in dense layers; embeddings, updates and logits are scaled."""

from __future__ import annotations

import math

from baton.worker.layers.spec import LayerSpec
from baton.worker.models.config import ModelConfig
from baton.worker.models.fields import Fields
from baton.worker.models.reading import Family, read_mlp, read_model, read_num_layers
from baton.worker.models.reading_latent import read_latent_attention

ARCHITECTURE = "MiniCPM3ForCausalLM"


def read(fields: Fields) -> ModelConfig:
    """Reads a config whose layers are all alike."""
    hidden, num_layers = fields.positive_int("hidden_size"), read_num_layers(fields)
    value_dim = fields.positive_int("v_head_dim", default=hidden // fields.positive_int("num_attention_heads"))
    own = Fields({**fields.raw, "v_head_dim": value_dim}, fields.source)
    depth = fields.positive_float("scale_depth", default=1.4)
    layer = LayerSpec(
        read_latent_attention(own, interleaved=False), read_mlp(fields), residual_scale=depth / math.sqrt(num_layers)
    )
    return read_model(
        fields,
        ARCHITECTURE,
        [layer] * num_layers,
        embedding_scale=fields.positive_float("scale_emb", default=12.0),
        logits_divisor=hidden / fields.positive_int("dim_model_base", default=256),
        default_eps=1e-5,
        default_tied=True,
    )


FAMILY = Family(ARCHITECTURE, "minicpm3", read, ignores_auto_map=True)
