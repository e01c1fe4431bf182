"""Estimates load 1: the requests per second that a worker could serve forever, with every prefix reused. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from baton.rpc.block_hash import HASH_BYTES
from baton.services.simulate.cluster.settings import ClusterSettings
from baton.services.simulate.requests.text import Texts
from baton.services.simulate.requests.workloads import Arrival


def requests_per_second(
    arrivals: Sequence[Arrival], texts: Texts, settings: ClusterSettings, itl_limit: float, since: float
) -> float:
    """Returns the rate for one worker if every block is computed once in the fleet, in the largest good batch.

    Counts arrivals from `since` on; earlier ones fill the cache. An upper bound: it ignores queues, imbalance and
    eviction.
    """
    device = settings.device
    known: set[bytes] = set()
    prefill = output = context = 0.0
    num_counted = 0
    for arrival in arrivals:
        prompt = arrival.prompt
        num_cached = min(_num_known(prompt.block_hashes, known) * settings.block_size, prompt.num_tokens - 1)
        known.update(_split(texts.extend(prompt, arrival.output_content, arrival.num_output_tokens).block_hashes))
        if arrival.time < since:
            continue
        num_counted += 1
        computed = prompt.num_tokens - num_cached
        prefill += device.prefill_seconds(computed, computed * (prompt.num_tokens + num_cached) // 2)
        num_decodes = arrival.num_output_tokens - 1  # the first token comes with the prompt
        output += num_decodes
        context += num_decodes * (prompt.num_tokens + num_decodes / 2)
    mean_prefill = prefill / num_counted
    if not output:
        return 1.0 / mean_prefill
    mean_context, mean_output = context / output, output / num_counted
    batch = _largest_batch(mean_context, mean_prefill / mean_output, settings, itl_limit)
    step = device.decode_seconds(batch, round(batch * mean_context))
    return 1.0 / (mean_prefill + mean_output * step / batch)


def _largest_batch(mean_context: float, prefill_per_token: float, settings: ClusterSettings, itl_limit: float) -> int:
    """Returns the largest batch within the limit. Each request adds to a step, and prompts run between steps."""
    device = settings.device
    in_memory = settings.num_blocks * settings.block_size / mean_context
    per_request = device.per_decode_request + device.per_context_token * mean_context + prefill_per_token
    in_time = (itl_limit - device.base) / per_request
    return max(1, int(min(in_memory, in_time, settings.engine.max_num_requests)))


def _num_known(block_hashes: bytes, known: set[bytes]) -> int:
    count = 0
    for block_hash in _split(block_hashes):
        if block_hash not in known:
            break
        count += 1
    return count


def _split(block_hashes: bytes) -> list[bytes]:
    return [block_hashes[i : i + HASH_BYTES] for i in range(0, len(block_hashes), HASH_BYTES)]
