"""The limits of batch and step that a device gets without settings. Large GPUs get larger ones, as in vLLM."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from baton.worker.config import WorkerConfig

_LARGE_GPU_BYTES = 70 << 30
_SLOWER = "A100"  # a step of many tokens takes too long on it


class Device(NamedTuple):
    """A GPU."""

    name: str
    num_bytes: int


class DeviceLimits(NamedTuple):
    """Requests of the running batch, and tokens of a step."""

    max_num_requests: int
    max_num_batched_tokens: int


SMALL = DeviceLimits(256, 2048)
LARGE = DeviceLimits(1024, 8192)


def limits_of(device: Device | None) -> DeviceLimits:
    """Returns the limits of a GPU. None: a CPU."""
    large = device is not None and device.num_bytes >= _LARGE_GPU_BYTES and _SLOWER not in device.name
    return LARGE if large else SMALL


def resolve_limits(config: WorkerConfig, device: Device | None) -> WorkerConfig:
    """Replaces limits of 0 by those of the device. A step holds one token of every request."""
    requests, tokens = config.max_num_requests, config.max_num_batched_tokens
    limits = limits_of(device)
    if not tokens:
        tokens = max(limits.max_num_batched_tokens, requests)
    return dataclasses.replace(
        config,
        max_num_requests=requests or min(limits.max_num_requests, tokens),
        max_num_batched_tokens=tokens,
    )


def with_device_limits(config: WorkerConfig) -> WorkerConfig:
    """Replaces limits of 0 by those of the configured device."""
    if config.max_num_requests and config.max_num_batched_tokens:
        return config
    return resolve_limits(config, _gpu() if config.executor == "cuda" else None)


def _gpu() -> Device | None:
    """Returns this process's GPU. None: there is none, which the executor reports."""
    import torch

    if not torch.cuda.is_available():
        return None
    facts = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Device(facts.name, facts.total_memory)
