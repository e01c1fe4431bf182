"""Which model this is, in 16 bytes: equal for equal weights however they are split into files. Reads little of them."""

from __future__ import annotations

import dataclasses
import hashlib
import json

from baton.worker.models.config import ModelConfig
from baton.worker.weights.checkpoint import Checkpoint

DIGEST_BYTES = 16
_SAMPLES = 4  # a tensor
_SAMPLE_BYTES = 64
# What does not change the KV of a token.
_IRRELEVANT = ("eos_token_ids", "initializer_range", "dtype", "max_position_embeddings")


def model_digest(config: ModelConfig, checkpoint: Checkpoint) -> bytes:
    """Over the config, and every tensor's name, type, shape and a few of its bytes."""
    hasher = _config_hasher(config)
    for name in checkpoint.names:
        entry = checkpoint.entry(name)
        hasher.update(f"{name}:{entry.dtype}:{entry.shape}".encode())
        for sample in range(_SAMPLES):
            offset = (entry.num_bytes - min(_SAMPLE_BYTES, entry.num_bytes)) * sample // (_SAMPLES - 1)
            hasher.update(checkpoint.sample(name, offset, _SAMPLE_BYTES))
    return hasher.digest()


def dummy_digest(config: ModelConfig, seed: int, device_type: str = "cpu") -> bytes:
    """Of dummy weights, which each type of device draws in its own way."""
    hasher = _config_hasher(config)
    hasher.update(f"dummy:{seed}:{device_type}:{config.initializer_range!r}".encode())
    return hasher.digest()


def _config_hasher(config: ModelConfig) -> hashlib.blake2b:
    facts = {key: value for key, value in dataclasses.asdict(config).items() if key not in _IRRELEVANT}
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=DIGEST_BYTES, person=b"baton-model")
