"""Identifies an adapter in 16 bytes: equal for equal configs and tensors, whatever they are called. Reads samples."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict

from baton.worker.adapters.peft_config import PeftConfig
from baton.worker.weights.files.safetensors_file import SafetensorsFile

DIGEST_BYTES = 16
_SAMPLES = 8  # a tensor
_SAMPLE_BYTES = 64


def adapter_digest(config: PeftConfig, file: SafetensorsFile) -> bytes:
    """Hashes what changes the result: scales, and every tensor's name, type, shape and sampled bytes."""
    facts = asdict(config)
    del facts["base_model"]
    if not config.parameters:  # adapters without them have the digests of earlier versions
        del facts["parameters"]
    text = json.dumps(facts)
    hasher = hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES, person=b"baton-adapter")
    for name, entry in sorted(file.entries.items()):
        hasher.update(f"{name}:{entry.dtype}:{entry.shape}".encode())
        size = min(_SAMPLE_BYTES, entry.num_bytes)
        for sample in range(_SAMPLES):
            offset = (entry.num_bytes - size) * sample // (_SAMPLES - 1)
            hasher.update(file.read(entry.start + offset, size))
    return hasher.digest()
