"""Whether a model's head is tied to its embedding, where config.json and the checkpoint differ."""

from __future__ import annotations

from dataclasses import replace

from baton.worker.models.config import ModelConfig
from baton.worker.weights.tensors import Tensors

_SAMPLES = 64
_SAMPLE_BYTES = 4096


def with_true_head(config: ModelConfig, checkpoint: Tensors) -> ModelConfig:
    """Returns the config with a head of its own if the checkpoint has one that differs from a tied embedding."""
    if not config.tie_embeddings or config.pooler is not None:
        return config
    embed, head = _name(config, checkpoint, config.names.embed), _name(config, checkpoint, config.names.lm_head)
    if not embed or not head or _are_equal(checkpoint, embed, head):
        return config
    return replace(config, tie_embeddings=False)


def tied_source(config: ModelConfig, checkpoint: Tensors, name: str) -> str:
    """Returns the name of the head if it is stored in place of the tied embedding `name`, else an empty one."""
    if not config.tie_embeddings or name != f"{config.names.embed}.weight" or _name(config, checkpoint, name[:-7]):
        return ""
    return _name(config, checkpoint, config.names.lm_head)


def _name(config: ModelConfig, checkpoint: Tensors, stem: str) -> str:
    return next((name for name in config.names.spellings(f"{stem}.weight") if name in checkpoint), "")


def _are_equal(checkpoint: Tensors, one: str, other: str) -> bool:
    """Compares types, shapes and samples."""
    first, second = checkpoint.entry(one), checkpoint.entry(other)
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    step = max(1, first.num_bytes // _SAMPLES)
    return all(
        checkpoint.sample(one, offset, _SAMPLE_BYTES) == checkpoint.sample(other, offset, _SAMPLE_BYTES)
        for offset in range(0, first.num_bytes, step)
    )
