"""Granite 3 with experts: Granite's layers and scales; the checkpoint stacks the experts."""

from __future__ import annotations

from dataclasses import replace

from baton.kernels.routing import RouterSpec
from baton.worker.layers.spec import ExpertsSpec
from baton.worker.models.config import ModelConfig
from baton.worker.models.families.granite import granite
from baton.worker.models.fields import Fields
from baton.worker.models.names import TensorNames
from baton.worker.models.reading import Family
from baton.worker.models.reading_experts import W_NAMES, read_router
from baton.worker.quantization.expert_names import ExpertNames

ARCHITECTURE = "GraniteMoeForCausalLM"
ROUTER = "block_sparse_moe.router.layer"
EXPERTS = ExpertNames(
    gate_up=("block_sparse_moe.input_linear.weight",),
    down="block_sparse_moe.output_linear.weight",
    other=W_NAMES,  # GGUF files have each expert's gates and ups apart
)
_NAMES = TensorNames(router=ROUTER, experts=EXPERTS)


def read(fields: Fields) -> ModelConfig:
    """Reads a config whose layers are all alike."""
    config = granite.read(Fields({**fields.raw, "mlp_bias": None}, fields.source))
    router = read_chosen_router(fields)
    layers = tuple(
        replace(layer, mlp=ExpertsSpec(router, fields.positive_int("intermediate_size"))) for layer in config.layers
    )
    return replace(config, architecture=ARCHITECTURE, names=_NAMES, layers=layers)


def read_chosen_router(fields: Fields) -> RouterSpec:
    """Reads the choice of experts by logits, whose softmax is over the chosen ones."""
    return replace(read_router(fields, ("num_local_experts",)), scores_chosen=True)


FAMILY = Family(ARCHITECTURE, "granitemoe", read)
