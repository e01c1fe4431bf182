"""A model as its config describes it, for those that load neither its weights nor PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

from baton.worker.models.config import ModelConfig
from baton.worker.models.supported.capacity import kv_bytes_per_token
from baton.worker.models.supported.cuda_limits import misfit
from baton.worker.models.supported.families import FAMILIES, summary_of


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What executors need of a model."""

    architecture: str
    implementation: str  # what computes the layers
    summary: str  # of the family; empty without one
    dtype: str  # of the checkpoint, or empty
    max_model_len: int
    kv_values_per_token: int
    cuda_refusal: str  # why executor=cuda cannot compute it, or empty


def describe(config: ModelConfig) -> ModelDescription:
    """Returns the description of a config."""
    family = FAMILIES.get(config.architecture) if config.transformers is None else None
    return ModelDescription(
        architecture=config.architecture,
        implementation=config.implementation,
        summary="" if family is None else summary_of(family),
        dtype=config.dtype,
        max_model_len=config.max_model_len,
        kv_values_per_token=kv_bytes_per_token(config, "float8_e4m3"),
        cuda_refusal=misfit(config),
    )
