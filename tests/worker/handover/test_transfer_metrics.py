"""A worker's counters of hand-overs: each is in the contract and in the metrics, and correct."""

from __future__ import annotations

import asyncio
import dataclasses
import http.client

import pytest
from support.fleet.kvstore_node import eventually
from support.processes import ports
from support.processes.stack import metric
from support.processes.worker_harness import running_worker, submit

from baton.v1 import control_pb2, types_pb2
from baton.worker.core import BlockHash
from baton.worker.front.metrics.transfers import transfer_metrics
from baton.worker.handover.bandwidth import Bandwidth
from baton.worker.handover.counters import HandoverCounters, counters_message
from baton.worker.kv.block_pool import BlockPool
from baton.worker.requests.histogram import Histogram
from baton.worker.transfer.base import TransportTotals

PROMPT_TOKENS = 400
NUM_REQUESTS = 6


def values_of(counters: control_pb2.TransferCounters) -> dict[str, float]:
    """Every sample, by name and labels but for the model's."""
    return {
        ",".join([sample.name, *(v for k, v in sorted(sample.labels.items()) if k != "model_name")]): sample.value
        for family in transfer_metrics(counters, "m")
        for sample in family.samples
    }


def test_every_counter_is_in_the_contract_and_changes_a_metric():
    zero = counters_message(HandoverCounters(), 0, [])
    for one in dataclasses.fields(HandoverCounters):
        counters = HandoverCounters()
        if isinstance(getattr(counters, one.name), Histogram):
            getattr(counters, one.name).observe(0.25)
        else:
            setattr(counters, one.name, 7)
        message = counters_message(counters, 0, [])
        assert message.HasField(one.name) if isinstance(getattr(counters, one.name), Histogram) else True
        assert message != zero, one.name
        assert values_of(message) != values_of(zero), f"{one.name} is in no metric"


def test_a_histogram_has_cumulative_buckets_up_to_infinity():
    counters = HandoverCounters(exposed_seconds=Histogram(bounds=(0.001, 0.1)))
    for seconds in (0.0, 0.001, 0.05, 3.0):
        counters.exposed_seconds.observe(seconds)
    values = values_of(counters_message(counters, 0, []))
    name = "baton_kv_transfer_exposed_seconds"
    assert [values[f"{name}_bucket,{bound}"] for bound in ("0.001", "0.1", "+Inf")] == [2, 3, 4]
    assert values[f"{name}_count"] == 4
    assert values[f"{name}_sum"] == pytest.approx(3.051)


def test_bandwidth_is_measured_while_bytes_move_and_forgets_slowly():
    bandwidth = Bandwidth()
    assert not bandwidth.known
    bandwidth.observe(TransportTotals(num_received_bytes=1000, receive_seconds=1.0))
    assert bandwidth.received == 1000
    bandwidth.observe(TransportTotals(num_received_bytes=1000, receive_seconds=1.0))
    assert bandwidth.received == 1000
    bandwidth.observe(TransportTotals(num_received_bytes=4000, receive_seconds=2.0))
    assert 1000 < bandwidth.received < 3000
    assert bandwidth.message("ipc").sent_bytes_per_second == 0


def test_the_pools_own_counts_are_those_of_its_audit():
    pool = BlockPool(20)
    held = pool.allocate(5)
    assert held is not None
    pool.store(held[:1], [BlockHash(bytes(16))])
    pool.free(held[:2])
    pool.lease(3)
    assert pool.count() == pool.audit()
    assert pool.count().num_cached_blocks == 1


async def scrape(port: int) -> str:
    def get() -> str:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("GET", "/metrics")
        return connection.getresponse().read().decode()

    return await asyncio.to_thread(get)


async def scrape_after(port: int, num_transfers: int) -> str:
    """Returns a scrape that has these transfers: one while the engine is busy shows an earlier answer."""

    async def complete() -> str | None:
        text = await scrape(port)
        return text if metric(text, "baton_kv_transfers_total") >= num_transfers else None

    return await eventually(complete, f"a scrape with {num_transfers} transfers")


async def test_a_scrape_after_real_transfers_has_their_bytes():
    listens = ports.free_ports(4)
    async with (
        running_worker(listens[0], role="prefill", worker_id="p", metrics_listen=f"127.0.0.1:{listens[2]}") as prefill,
        running_worker(listens[1], role="decode", worker_id="d", metrics_listen=f"127.0.0.1:{listens[3]}") as decode,
    ):
        endpoint = types_pb2.Endpoint(worker_id="p", epoch=1, address=prefill.address)
        prompts = [[5 + (i * 31 + salt * 977) % 4000 for i in range(PROMPT_TOKENS)] for salt in range(NUM_REQUESTS)]
        await decode.stream().generate(*(submit(i, p, 4, prefill=endpoint) for i, p in enumerate(prompts)))
        await decode.until_idle()
        await prefill.until_idle()
        received, sent = [await scrape_after(port, NUM_REQUESTS) for port in (listens[3], listens[2])]
        layout = (await decode.state()).layout
    num_bytes = NUM_REQUESTS * -(-PROMPT_TOKENS // layout.block_size) * layout.block_size * 8 * layout.num_layers
    for text, direction, other in ((received, "received", "sent"), (sent, "sent", "received")):
        assert metric(text, "baton_kv_transfers_total", direction=direction) == NUM_REQUESTS
        assert metric(text, "baton_kv_transfers_total", direction=other) == 0
        assert metric(text, "baton_kv_transfer_bytes_total", direction=direction) == num_bytes
        assert metric(text, "baton_kv_transfer_failed_total") == 0
        assert metric(text, "baton_kv_transfer_retries_total") == 0
        assert metric(text, "baton_kv_transfer_expired_leases_total") == 0
        assert metric(text, "baton_kv_stranded_blocks") == 0
        assert "baton_kv_stranded_blocks{" in text
    for name in ("baton_kv_transfer_seconds", "baton_kv_transfer_exposed_seconds"):
        assert metric(received, f"{name}_count") == NUM_REQUESTS
    assert metric(received, "baton_kv_transfer_seconds_sum") > 0
    assert metric(sent, "baton_kv_transfer_tail_seconds_count") == NUM_REQUESTS
    assert metric(received, "baton_kv_transfer_bytes_per_second", direction="received") > 0
