"""Granite 4, dense and without Mamba layers: Granite 3's layers under other names, with or without RoPE."""

from __future__ import annotations

from dataclasses import replace

from baton.worker.layers.rope_config import NO_ROPE, RopeConfig
from baton.worker.models.config import ModelConfig
from baton.worker.models.families.granite import granite
from baton.worker.models.fields import Fields
from baton.worker.models.names import TensorNames
from baton.worker.models.reading import Family, read_num_layers

ARCHITECTURE = "GraniteMoeHybridForCausalLM"
_NAMES = TensorNames(gate_up=("shared_mlp.input_linear",), down="shared_mlp.output_linear")
_ATTENTION = {"attention", "full_attention"}


def read(fields: Fields) -> ModelConfig:
    """Reads a config whose layers are all alike. Raises InvalidRequest for Mamba layers and for experts."""
    num_layers, kinds = read_num_layers(fields), fields.raw.get("layer_types")
    if not isinstance(kinds, list) or len(kinds) != num_layers or set(kinds) - _ATTENTION:
        raise fields.error("layer_types", f"a list of {num_layers} x attention: no other layers are supported")
    if fields.raw.get("num_local_experts", 8) != 0:
        raise fields.error("num_local_experts", "0: no experts are supported")
    position = fields.text("position_embedding_type", default="nope")
    if position not in ("rope", "nope"):
        raise fields.error("position_embedding_type", "rope or nope")
    width = fields.positive_int("shared_intermediate_size", default=1024)
    config = granite.read(Fields({**fields.raw, "intermediate_size": width, "mlp_bias": None}, fields.source))
    layer = config.layers[0]
    if position == "nope":
        layer = replace(layer, attention=replace(layer.attention, rope=RopeConfig(NO_ROPE, 0.0)))
    return replace(config, architecture=ARCHITECTURE, names=_NAMES, layers=(layer,) * num_layers)


FAMILY = Family(ARCHITECTURE, "granitemoehybrid", read)
