"""SmolLM3: Llama's layers, some of which have no RoPE."""

from __future__ import annotations

from dataclasses import replace

from baton.worker.layers.rope_config import NO_ROPE, RopeConfig
from baton.worker.layers.spec import LayerSpec
from baton.worker.models.config import ModelConfig
from baton.worker.models.fields import Fields
from baton.worker.models.reading import (
    Family,
    read_attention,
    read_mlp,
    read_model,
    read_num_layers,
    read_optional_windows,
)
from baton.worker.models.reading_rope import RopeDefaults, read_rope

ARCHITECTURE = "SmolLM3ForCausalLM"


def read(fields: Fields) -> ModelConfig:
    """Reads layers that may differ in RoPE and window."""
    num_layers = read_num_layers(fields)
    bias = fields.flag("attention_bias", default=False)
    rope = read_rope(fields, RopeDefaults(theta=2e6))
    attention = replace(read_attention(fields, rope), qkv_bias=bias, o_bias=bias)
    mlp = replace(read_mlp(fields), bias=fields.flag("mlp_bias", default=False))
    rotates = _read_rotates(fields, num_layers)
    unrotated = replace(attention, rope=RopeConfig(NO_ROPE, 0.0))
    windows = read_optional_windows(fields, num_layers, [not each for each in rotates])
    layers = [
        LayerSpec(replace(attention if rotated else unrotated, window=window), mlp)
        for rotated, window in zip(rotates, windows, strict=True)
    ]
    return read_model(fields, ARCHITECTURE, layers, default_tied=True)


def _read_rotates(fields: Fields, num_layers: int) -> list[bool]:
    """Reads no_rope_layers, which has a 1 for layers with RoPE. Returns True for those."""
    flags = fields.raw.get("no_rope_layers")
    if flags is None:
        interval = fields.positive_int("no_rope_layer_interval", default=4)
        return [layer % interval != 0 for layer in range(1, num_layers + 1)]
    if not isinstance(flags, list) or len(flags) < num_layers or any(flag not in (0, 1) for flag in flags):
        raise fields.error("no_rope_layers", f"a list of {num_layers} x 0 or 1")
    return [bool(flag) for flag in flags[:num_layers]]


FAMILY = Family(ARCHITECTURE, "smollm3", read)
