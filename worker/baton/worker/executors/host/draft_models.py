"""Loads a draft model: a smaller model with the tokenizer of the one that verifies."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from baton.rpc.errors import Unsupported
from baton.worker.config import WorkerConfig
from baton.worker.core import HeadKind
from baton.worker.models.config import ModelConfig
from baton.worker.speculation.vocabularies import check_same_vocabulary
from baton.worker.speculation_settings import SpeculationSettings
from baton.worker.weights.loading import LoadedModel, ModelOptions, load_model, read_config
from baton.worker.weights.resolve import resolve_model

_FIELD = "speculative_config"


@dataclass(frozen=True, slots=True)
class DraftMemory:
    """The sizes of a draft model's batch and KV pool."""

    num_rows: int
    max_model_len: int  # of the model that verifies
    block_size: int
    num_blocks: int


def load_draft_model(
    settings: SpeculationSettings,
    config: WorkerConfig,
    options: ModelOptions,
    dtype: torch.dtype,
    device: torch.device | None = None,
) -> LoadedModel:
    """Loads the model that guesses for a worker's. Raises InvalidRequest for another tokenizer, and Unsupported for a
    model that cannot guess."""
    options = replace(options, revision=settings.revision, overrides={}, max_model_len=0, convert="auto")
    source, load_format = settings.model, config.load_format
    check_draft_config(read_config(source, load_format, options), source)
    if load_format != "dummy":
        ours = resolve_model(config.model, config.revision)
        check_same_vocabulary(ours, resolve_model(source, settings.revision))
    if device is None:
        return load_model(source, load_format, dtype, options=options)
    return load_model(source, load_format, dtype, device, options)


def check_draft_config(config: ModelConfig, source: str) -> None:
    """Raises Unsupported for a model that cannot guess."""
    if HeadKind.GENERATE not in config.heads or not config.cached:
        raise draft_refusal(source, "it generates no text")
    if config.state_layers:
        raise draft_refusal(source, "its layers keep states, which cannot go back behind a wrong guess")


def draft_refusal(source: str, reason: str) -> Unsupported:
    """Returns the error for a draft model that cannot guess."""
    return Unsupported(
        f"{_FIELD}: {source} cannot be a draft model: {reason}; give a model whose layers all have attention",
        field=_FIELD,
    )
