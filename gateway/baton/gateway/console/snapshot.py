"""The snapshot that consoles receive every second, as JSON. Times are in seconds and sizes in bytes; 64-bit ids are
text for JavaScript.

A value that is unknown, because no router answered or nothing has happened yet, is null.
"""

from __future__ import annotations

import msgspec


class RouterSight(msgspec.Struct):
    """A router of this gateway."""

    address: str
    problem: str  # empty: it answers


class WorkerSight(msgspec.Struct):
    worker_id: str  # empty: it has not reported yet
    address: str
    role: str  # prefill, decode, both or unknown
    state: str  # serving, draining, cordoned or dead
    problem: str
    epoch: str
    model: str
    running: int
    queue_depth: int
    max_requests: int
    in_flight: int  # placed but not in the worker's own counts yet
    num_blocks: int
    kv_usage: float | None  # 0 to 1
    host_kv_usage: float | None  # 0 to 1; null: no host memory for KV
    hit_rate: float | None  # of prompt tokens in the window, 0 to 1
    prompt_tokens_per_second: float | None
    output_tokens_per_second: float | None
    received_bytes_per_second: float | None
    preemptions: int  # since its start
    tokens_per_step: float | None = None  # of a request that decodes; above 1 with speculation
    num_adapters: int | None = None  # on the device; null: without LoRA
    num_adapter_slots: int = 0  # that the device has room for
    adapters: list[str] = msgspec.field(default_factory=list)  # the first names of those on the device
    num_served_adapters: int = 0  # that requests may name


class FlowSight(msgspec.Struct):
    """KV transfers between two workers in the window."""

    sender: str
    receiver: str
    bytes_per_second: float
    transfers_per_second: float


class Percentiles(msgspec.Struct):
    """The percentiles of one quantity."""

    p50: float
    p90: float
    p99: float


class FleetSight(msgspec.Struct):
    """Totals of all workers and placements."""

    num_workers: int
    num_alive: int
    running: int
    queue_depth: int
    kv_usage: float | None
    hit_rate: float | None  # over the prompts of requests that ended in the window
    prompt_tokens_per_second: float | None
    output_tokens_per_second: float | None
    transfer_bytes_per_second: float | None
    num_flows: int  # total number; a snapshot contains the largest
    placements_per_second: float | None
    refusals_per_second: float | None
    failures_per_second: float | None  # placements whose worker failed
    ttft: Percentiles | None  # over requests that ended within percentile_seconds
    itl: Percentiles | None
    percentile_seconds: float  # window of the percentiles


class PlacementSight(msgspec.Struct):
    """A summary of one placement."""

    placement_id: str
    request_id: str
    model: str
    tenant: str
    decode: str
    prefill: str  # empty: the decode worker prefills
    state: str  # running, finished or failed
    age: float
    prompt_tokens: int
    predicted_tokens: int  # prompt tokens expected in caches
    cached_tokens: int | None
    output_tokens: int | None
    ttft: float | None
    itl: float | None
    seconds: float | None  # from the placement attempt to the end


class Snapshot(msgspec.Struct):
    """The current state of the fleet."""

    time: float  # Unix seconds
    version: str
    window: float  # window of the rates in seconds; 0: this is the first snapshot
    heard_age: float | None  # seconds since a router's last reply; null: none yet
    routers: list[RouterSight]
    fleet: FleetSight
    workers: list[WorkerSight]
    flows: list[FlowSight]  # largest first
    placements: list[PlacementSight]  # newest first
