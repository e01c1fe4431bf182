"""The rows of a device's batch, in which a step with drafts has a sequence for each token."""

from __future__ import annotations

from dataclasses import replace

from baton.worker.config import WorkerConfig

_REQUESTS = 8  # that have room for all their drafts, however few a batch may have


def with_room_for_drafts(config: WorkerConfig) -> WorkerConfig:
    """Returns the config with more rows, if a batch of few requests has no room for their drafts."""
    if config.speculation is None:
        return config
    tokens = 1 + config.speculation.num_speculative_tokens
    wanted = min(tokens * min(config.max_num_requests, _REQUESTS), config.max_num_batched_tokens)
    return replace(config, max_num_requests=max(config.max_num_requests, wanted))
