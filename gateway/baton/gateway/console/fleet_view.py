"""Converts routers' replies to snapshots for consoles. Keeps the last minute; does no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from baton.gateway.console.percentiles import percentiles_of
from baton.gateway.console.samples import (
    PERCENTILE_SECONDS,
    RATE_SECONDS,
    RouterChange,
    Samples,
    WorkerChange,
    sample_of,
)
from baton.gateway.console.snapshot import (
    FleetSight,
    FlowSight,
    PlacementSight,
    RouterSight,
    Snapshot,
    WorkerSight,
)
from baton.gateway.routers.client import RouterReply
from baton.gateway.version import VERSION
from baton.v1 import router_pb2, types_pb2

MAX_PLACEMENTS = 40
_MAX_FLOWS = 64
_MAX_NAMES = 32
_ROLES = {
    types_pb2.WORKER_ROLE_PREFILL: "prefill",
    types_pb2.WORKER_ROLE_DECODE: "decode",
    types_pb2.WORKER_ROLE_BOTH: "both",
}
_NOTHING = RouterChange(0.0, 0, 0, 0, 0, 0, (), ())


class FleetView:
    """Makes successive snapshots. While no router answers, shows the last reply."""

    def __init__(self) -> None:
        self._samples = Samples()
        self._entries: list[router_pb2.WorkerEntry] = []
        self._placements: list[PlacementSight] = []
        self._heard_at: float | None = None

    def take(self, replies: Sequence[RouterReply], now: float, wall_time: float) -> Snapshot:
        """Returns a snapshot of all routers' replies at `now` (monotonic seconds)."""
        fleets = [reply.fleet for reply in replies if reply.fleet is not None]
        if fleets:
            self._heard_at = now
            self._entries = merged_workers(fleets)
            self._placements = merged_placements(fleets)
            self._samples.add(sample_of(now, self._entries, fleets))
        heard = bool(fleets)
        changes = self._samples.worker_changes() if heard else {}
        workers = [worker_sight(entry, changes.get(entry.state.worker_id)) for entry in self._entries]
        rates = self._samples.router_change(RATE_SECONDS) if heard else None
        flows = flow_sights(changes)
        return Snapshot(
            time=wall_time,
            version=VERSION,
            window=rates.seconds if rates is not None else 0.0,
            heard_age=None if self._heard_at is None else now - self._heard_at,
            routers=[RouterSight(reply.address, reply.problem) for reply in replies],
            fleet=self._fleet(workers, flows, rates),
            workers=workers,
            flows=flows[:_MAX_FLOWS],
            placements=self._placements,
        )

    def _fleet(
        self, workers: Sequence[WorkerSight], flows: Sequence[FlowSight], rates: RouterChange | None
    ) -> FleetSight:
        alive = [worker for worker in workers if worker.state != "dead"]
        change = rates or _NOTHING
        lately = (self._samples.router_change(PERCENTILE_SECONDS) if rates is not None else None) or _NOTHING
        num_blocks = sum(worker.num_blocks for worker in alive)
        used = sum((worker.kv_usage or 0.0) * worker.num_blocks for worker in alive)
        return FleetSight(
            num_workers=len(workers),
            num_alive=len(alive),
            running=sum(worker.running for worker in alive),
            queue_depth=sum(worker.queue_depth for worker in alive),
            kv_usage=used / num_blocks if num_blocks else None,
            hit_rate=change.cached_tokens / change.prompt_tokens if change.prompt_tokens else None,
            prompt_tokens_per_second=_sum(worker.prompt_tokens_per_second for worker in alive),
            output_tokens_per_second=_sum(worker.output_tokens_per_second for worker in alive),
            transfer_bytes_per_second=sum(flow.bytes_per_second for flow in flows) if rates is not None else None,
            num_flows=len(flows),
            placements_per_second=_rate(change.placed, change.seconds),
            refusals_per_second=_rate(change.refused, change.seconds),
            failures_per_second=_rate(change.failed, change.seconds),
            ttft=percentiles_of(self._samples.ttft_bounds, lately.ttft),
            itl=percentiles_of(self._samples.itl_bounds, lately.itl),
            percentile_seconds=lately.seconds,
        )


def merged_workers(fleets: Sequence[router_pb2.GetFleetResponse]) -> list[router_pb2.WorkerEntry]:
    """Returns each worker once, by address; prefers a router's entry that is alive."""
    known: dict[str, router_pb2.WorkerEntry] = {}
    for fleet in fleets:
        for entry in fleet.workers:
            before = known.get(entry.address)
            if before is None or (entry.alive and not before.alive):
                known[entry.address] = entry
    return sorted(known.values(), key=lambda entry: (entry.state.worker_id, entry.address))


def merged_placements(fleets: Sequence[router_pb2.GetFleetResponse]) -> list[PlacementSight]:
    """Returns the newest placements of all routers; up to half of them have ended."""
    placed: dict[int, router_pb2.PlacementSummary] = {}
    ended: dict[int, router_pb2.PlacementSummary] = {}
    for fleet in fleets:
        ended.update((one.placement_id, one) for one in fleet.reported)
        placed.update((one.placement_id, one) for one in fleet.placed if not one.HasField("outcome"))
    half = MAX_PLACEMENTS // 2
    newest_ended = sorted(ended.values(), key=lambda one: one.age_ms)
    newest_placed = sorted(placed.values(), key=lambda one: one.age_ms)
    num_placed = max(half, MAX_PLACEMENTS - len(newest_ended))
    shown = newest_placed[:num_placed]
    shown += newest_ended[: MAX_PLACEMENTS - len(shown)]
    return [placement_sight(one) for one in sorted(shown, key=lambda one: one.age_ms)]


def worker_sight(entry: router_pb2.WorkerEntry, change: WorkerChange | None) -> WorkerSight:
    """Returns a worker's row. `change` is its recent activity, or None if unknown."""
    state, load = entry.state, entry.state.load
    used = load.num_blocks - load.num_free_blocks
    sight = WorkerSight(
        worker_id=state.worker_id,
        address=entry.address,
        role=_ROLES.get(state.role, "unknown"),
        state=_state_of(entry),
        problem=entry.problem,
        epoch=str(state.epoch),
        model=state.model.name,
        running=load.num_running,
        queue_depth=load.queue_depth,
        max_requests=load.max_num_requests,
        in_flight=entry.num_in_flight,
        num_blocks=load.num_blocks,
        kv_usage=used / load.num_blocks if load.num_blocks else None,
        host_kv_usage=load.num_cached_host_blocks / load.num_host_blocks if load.num_host_blocks else None,
        hit_rate=None,
        prompt_tokens_per_second=None,
        output_tokens_per_second=None,
        received_bytes_per_second=None,
        preemptions=state.totals.num_preemptions,
        tokens_per_step=load.decode_tokens_per_step or None,
        num_adapters=load.num_resident_adapters if load.num_adapter_slots else None,
        num_adapter_slots=load.num_adapter_slots,
        adapters=list(state.adapters[:_MAX_NAMES]),
        num_served_adapters=len(state.model.adapters),
    )
    if change is not None:
        sight.hit_rate = change.cached_tokens / change.prompt_tokens if change.prompt_tokens else None
        sight.prompt_tokens_per_second = change.prompt_tokens / change.seconds
        sight.output_tokens_per_second = change.output_tokens / change.seconds
        sight.received_bytes_per_second = sum(num_bytes for num_bytes, _ in change.flows.values()) / change.seconds
    return sight


def flow_sights(changes: Mapping[str, WorkerChange]) -> list[FlowSight]:
    """Returns all transfers, largest first."""
    flows = [
        FlowSight(sender, receiver, num_bytes / change.seconds, num_transfers / change.seconds)
        for receiver, change in changes.items()
        for sender, (num_bytes, num_transfers) in change.flows.items()
    ]
    return sorted(flows, key=lambda flow: (-flow.bytes_per_second, flow.sender, flow.receiver))


def placement_sight(one: router_pb2.PlacementSummary) -> PlacementSight:
    """Returns a placement's row."""
    has_ended = one.HasField("outcome")
    outcome = one.outcome
    ended_well = has_ended and not outcome.worker_failed
    times = outcome.times
    ttft = (times.place_us + outcome.first_token_us) * 1e-6 if outcome.first_token_us else None
    return PlacementSight(
        placement_id=str(one.placement_id),
        request_id=one.request_id,
        model=one.model,
        tenant=one.tenant,
        decode=one.decode_worker_id,
        prefill=one.prefill_worker_id,
        state="finished" if ended_well else "failed" if has_ended else "running",
        age=one.age_ms / 1000,
        prompt_tokens=one.num_prompt_tokens,
        predicted_tokens=one.num_predicted_tokens,
        cached_tokens=outcome.num_cached_tokens if ended_well else None,
        output_tokens=outcome.num_output_tokens if has_ended else None,
        ttft=ttft,
        itl=times.mean_itl_us * 1e-6 or None,
        seconds=ttft + times.decode_us * 1e-6 if ttft is not None and outcome.HasField("times") else None,
    )


def _state_of(entry: router_pb2.WorkerEntry) -> str:
    if not entry.alive:
        return "dead"
    if entry.cordoned:
        return "cordoned"
    return "draining" if entry.state.draining else "serving"


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if seconds else None


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
