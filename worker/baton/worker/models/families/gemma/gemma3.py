"""Gemma 3, text: Gemma 2's layers with norms of queries and keys, and a RoPE for each kind of layer."""

from __future__ import annotations

from dataclasses import replace

from baton.worker.models.config import ModelConfig
from baton.worker.models.families.gemma.gemma import read_around
from baton.worker.models.families.gemma.gemma2 import NAMES, read_cap, read_layer, with_defaults
from baton.worker.models.fields import Fields
from baton.worker.models.reading import (
    Family,
    all_but_every,
    read_attention,
    read_num_layers,
    read_slides,
    read_windows,
)
from baton.worker.models.reading_rope import RopeDefaults, read_ropes

ARCHITECTURE = "Gemma3ForCausalLM"


def read(fields: Fields) -> ModelConfig:
    """Reads layers that differ in window and RoPE."""
    fields = with_defaults(fields)
    local = fields.positive_float("rope_local_base_freq", default=10000.0)
    full, sliding = read_ropes(fields, full=RopeDefaults(theta=1e6), sliding=RopeDefaults(theta=local))
    # Transformers ignores attn_logit_softcapping of this architecture.
    layer = read_layer(fields, replace(read_attention(fields, full), qk_norm="head"))
    usual = all_but_every(fields.positive_int("sliding_window_pattern", default=6), read_num_layers(fields))
    layers = [
        replace(layer, attention=replace(layer.grouped, rope=sliding if slides else full, window=window))
        for slides, window in zip(read_slides(fields, usual), read_windows(fields, len(usual), usual), strict=True)
    ]
    cap = read_cap(fields, "final_logit_softcapping", 0.0)
    return read_around(fields, ARCHITECTURE, layers, names=NAMES, cap=cap)


FAMILY = Family(ARCHITECTURE, "gemma3_text", read)
