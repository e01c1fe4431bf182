"""Under which of a family's names a checkpoint has its experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from baton.worker.models.config import ModelConfig
from baton.worker.quantization.expert_names import ExpertNames
from baton.worker.weights.tensors import Tensors


def with_stored_experts(config: ModelConfig, checkpoint: Tensors) -> ModelConfig:
    """Returns the config with the other names of experts if the checkpoint has those, else the config itself."""
    experts = config.names.experts
    if experts.other is None or _has_any(config, checkpoint, experts):
        return config
    if not _has_any(config, checkpoint, experts.other):
        return config
    return replace(config, names=replace(config.names, experts=experts.other))


def _has_any(config: ModelConfig, checkpoint: Tensors, experts: ExpertNames) -> bool:
    return any(name in checkpoint for name in _down_names(config, experts))


def _down_names(config: ModelConfig, experts: ExpertNames) -> Iterator[str]:
    for layer in range(config.num_layers):
        yield config.names.prefixes(layer)[1] + experts.down.format(0)
