"""Embedders made of causal architectures, whose tokens see all of their text: `is_causal: false` in config.json."""

from __future__ import annotations

from dataclasses import replace

from baton.worker.layers.spec import AttentionSpec, LayerSpec
from baton.worker.models.config import ModelConfig
from baton.worker.models.fields import Fields

_KEY = "is_causal"


def with_both_sides(config: ModelConfig, fields: Fields) -> ModelConfig:
    """Returns the config with layers that see both sides of a token, if its file says so, as Transformers reads it.

    Raises InvalidRequest for layers that keep a state, or that have windows, caps or sinks.
    """
    if fields.flag(_KEY, default=True) or not config.cached:
        return config
    layers = tuple(_seeing_all(layer, config, fields) for layer in config.layers)
    return replace(config, layers=layers, default_pick="mean")


def require_order(fields: Fields) -> None:
    """Raises InvalidRequest for a config whose layers see both sides."""
    if not fields.flag(_KEY, default=True):
        raise fields.error(_KEY, "true: layers by Transformers run over a cache, which needs an order")


def _seeing_all(layer: LayerSpec, config: ModelConfig, fields: Fields) -> LayerSpec:
    attention = layer.attention
    if not isinstance(attention, AttentionSpec) or attention.window or attention.soft_cap or attention.sinks:
        raise fields.error(
            _KEY, f"true: layers of {config.architecture} have windows, caps, sinks or a state, which need an order"
        )
    return replace(layer, attention=replace(attention, causal=False))
