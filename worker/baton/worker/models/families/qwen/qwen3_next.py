"""Qwen3-Next: Gated DeltaNet in most layers, gated attention in the others, and experts with a shared one."""

from __future__ import annotations

from dataclasses import replace

from baton.worker.layers.spec import ExpertsSpec, LayerSpec, MlpSpec, NormSpec
from baton.worker.models.config import ModelConfig
from baton.worker.models.families.qwen.delta_net import read_delta_net, read_gated_attention, read_kinds
from baton.worker.models.fields import Fields
from baton.worker.models.names import TensorNames
from baton.worker.models.reading import Family, read_mlp, read_model, read_num_layers
from baton.worker.models.reading_experts import read_router, read_sparse_layers

ARCHITECTURE = "Qwen3NextForCausalLM"
_SHARED = "mlp.shared_expert."
_NAMES = TensorNames(shared_gate_up=(_SHARED + "gate_proj", _SHARED + "up_proj"), shared_down=_SHARED + "down_proj")


def read(fields: Fields) -> ModelConfig:
    """Reads layers that differ in attention and MLP."""
    num_layers = read_num_layers(fields)
    attention, delta_net = read_gated_attention(fields), read_delta_net(fields, by_key_head=True)
    experts = ExpertsSpec(
        replace(read_router(fields), renormalized=fields.flag("norm_topk_prob", default=True)),
        fields.positive_int("moe_intermediate_size"),
        shared=MlpSpec(fields.positive_int("shared_expert_intermediate_size")),
        shared_gate=True,
    )
    layers = [
        LayerSpec(attention if full else delta_net, experts if sparse else read_mlp(fields))
        for full, sparse in zip(read_kinds(fields, num_layers), read_sparse_layers(fields, num_layers), strict=True)
    ]
    norm = NormSpec(fields.positive_float("rms_norm_eps", default=1e-6), offset=1.0)
    return read_model(fields, ARCHITECTURE, layers, names=_NAMES, norm=norm)


FAMILY = Family(ARCHITECTURE, "qwen3_next", read)
