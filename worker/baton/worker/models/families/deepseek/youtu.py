"""Youtu-LLM: the latent attention of DeepSeek-V3 in dense layers."""

from __future__ import annotations

from baton.worker.layers.spec import LayerSpec
from baton.worker.models.config import ModelConfig
from baton.worker.models.fields import Fields
from baton.worker.models.reading import Family, read_mlp, read_model, read_num_layers
from baton.worker.models.reading_latent import read_latent_attention

ARCHITECTURE = "YoutuForCausalLM"


def read(fields: Fields) -> ModelConfig:
    """Reads a config whose layers are all alike."""
    attention = read_latent_attention(fields, interleaved=fields.flag("rope_interleave", default=True))
    layers = [LayerSpec(attention, read_mlp(fields))] * read_num_layers(fields)
    return read_model(fields, ARCHITECTURE, layers, default_tied=True)


FAMILY = Family(ARCHITECTURE, "youtu", read, ignores_auto_map=True)
