"""A line in the log at an interval while the worker has requests: throughput, load, cache."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from baton.v1 import control_pb2

_log = logging.getLogger(__name__)

ReadStats = Callable[[], Awaitable[control_pb2.GetStatsResponse]]


async def log_stats(read: ReadStats, seconds: float) -> None:
    """Logs a line every `seconds` until it is cancelled. Call once the engine is ready."""
    before, began = await read(), time.monotonic()
    while True:
        await asyncio.sleep(seconds)
        with contextlib.suppress(Exception):  # an engine that does not answer is reported elsewhere
            stats, now = await read(), time.monotonic()
            facts = stats_between(before, stats, now - began)
            if facts is not None:
                _log.info("%s", line_of(facts), extra=facts)
            before, began = stats, now


def stats_between(
    before: control_pb2.GetStatsResponse, after: control_pb2.GetStatsResponse, seconds: float
) -> dict[str, Any] | None:
    """Returns what happened between two states. None: nothing did."""
    old, new, load = before.counters, after.counters, after.state.load
    prompt = new.num_prompt_tokens - old.num_prompt_tokens
    cached = new.num_cached_tokens - old.num_cached_tokens
    output = new.num_output_tokens - old.num_output_tokens
    if not (prompt or output or load.num_running or load.queue_depth):
        return None
    used = 1 - load.num_free_blocks / load.num_blocks if load.num_blocks else 0.0
    return {
        "prompt_tokens_per_second": round(prompt / seconds, 1),
        "output_tokens_per_second": round(output / seconds, 1),
        "running": load.num_running,
        "waiting": load.queue_depth,
        "kv_usage_percent": round(100 * used, 1),
        "prefix_hit_percent": round(100 * cached / prompt, 1) if prompt else None,
        "preemptions": new.num_preemptions - old.num_preemptions,
    }


def line_of(facts: dict[str, Any]) -> str:
    """Returns the line for people."""
    hits = facts["prefix_hit_percent"]
    parts = [
        f"prompt {facts['prompt_tokens_per_second']:,.1f} tokens/s",
        f"output {facts['output_tokens_per_second']:,.1f} tokens/s",
        f"running {facts['running']}",
        f"waiting {facts['waiting']}",
        f"KV {facts['kv_usage_percent']:.1f} %",
        *([] if hits is None else [f"prefix hits {hits:.1f} %"]),
        *([f"preemptions {facts['preemptions']}"] if facts["preemptions"] else []),
    ]
    return ", ".join(parts)
