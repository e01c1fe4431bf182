"""Cohere's Command R7B and A: Command R's layers with windows; layers with full attention have no RoPE."""

from __future__ import annotations

from dataclasses import replace

from baton.worker.layers.rope_config import NO_ROPE, RopeConfig
from baton.worker.models.config import ModelConfig
from baton.worker.models.families.cohere.cohere import read_around, read_layer
from baton.worker.models.fields import Fields
from baton.worker.models.reading import Family, all_but_every, read_num_layers, read_windows

ARCHITECTURE = "Cohere2ForCausalLM"


def read(fields: Fields) -> ModelConfig:
    """Reads layers that differ in window and RoPE."""
    # A null turns windows off, and RoPE with them.
    fields = Fields({"sliding_window": 4096, **fields.raw}, fields.source)
    layer = read_layer(fields)
    usual = all_but_every(fields.positive_int("sliding_window_pattern", default=4), read_num_layers(fields))
    full = replace(layer.grouped, rope=RopeConfig(NO_ROPE, 0.0))
    layers = [
        replace(layer, attention=replace(layer.grouped, window=window) if window else full)
        for window in read_windows(fields, len(usual), usual)
    ]
    return read_around(fields, ARCHITECTURE, layers)


FAMILY = Family(ARCHITECTURE, "cohere2", read)
