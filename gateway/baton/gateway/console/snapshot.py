"""What consoles are told each second, as JSON. Seconds and bytes; identifiers of 64 bits are text, for JavaScript.

A figure that is not known, because nothing was heard or nothing happened yet, is null.
"""

from __future__ import annotations

import msgspec


class RouterSight(msgspec.Struct):
    """One router of this gateway."""

    address: str
    problem: str  # empty: it answers


class WorkerSight(msgspec.Struct):
    """One worker."""

    worker_id: str  # empty: it has told nothing yet
    address: str
    role: str  # prefill, decode, both or unknown
    state: str  # serving, draining, cordoned or dead
    problem: str
    epoch: str
    model: str
    running: int
    queue_depth: int
    max_requests: int
    in_flight: int  # placed, and not in the worker's own figures yet
    num_blocks: int
    kv_usage: float | None  # 0 to 1
    host_kv_usage: float | None  # 0 to 1; null: it has no host memory for KV
    hit_rate: float | None  # of prompt tokens in the window, 0 to 1
    prompt_tokens_per_second: float | None
    output_tokens_per_second: float | None
    received_bytes_per_second: float | None
    preemptions: int  # since its start


class FlowSight(msgspec.Struct):
    """KV on its way from one worker to another, in the window."""

    sender: str
    receiver: str
    bytes_per_second: float
    transfers_per_second: float


class Percentiles(msgspec.Struct):
    """Of one quantity."""

    p50: float
    p90: float
    p99: float


class FleetSight(msgspec.Struct):
    """All workers and all placements together."""

    num_workers: int
    num_alive: int
    running: int
    queue_depth: int
    kv_usage: float | None
    hit_rate: float | None  # of the prompts of requests that ended in the window
    prompt_tokens_per_second: float | None
    output_tokens_per_second: float | None
    transfer_bytes_per_second: float | None
    num_flows: int  # of which a snapshot has the largest
    placements_per_second: float | None
    refusals_per_second: float | None
    failures_per_second: float | None  # placements whose worker failed
    ttft: Percentiles | None  # of requests that ended within percentile_seconds
    itl: Percentiles | None
    percentile_seconds: float  # how far back the percentiles look


class PlacementSight(msgspec.Struct):
    """One placement, in short."""

    placement_id: str
    request_id: str
    model: str
    tenant: str
    decode: str
    prefill: str  # empty: the decode worker prefills
    state: str  # running, finished or failed
    age: float
    prompt_tokens: int
    predicted_tokens: int  # of the prompt, expected in caches
    cached_tokens: int | None
    output_tokens: int | None
    ttft: float | None
    itl: float | None
    seconds: float | None  # from the question to a router to the end


class Snapshot(msgspec.Struct):
    """The fleet as of now."""

    time: float  # since 1970
    version: str
    window: float  # seconds that rates look back; 0: this is the first snapshot
    heard_age: float | None  # seconds since a router said something; null: none ever did
    routers: list[RouterSight]
    fleet: FleetSight
    workers: list[WorkerSight]
    flows: list[FlowSight]  # the largest first
    placements: list[PlacementSight]  # the newest first
