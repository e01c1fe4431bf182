"""A router's metrics."""

import asyncio

from support.fleet.fleet_node import state
from support.fleet.kvstore_node import blocks
from support.processes import ports
from support.processes.stack import metric

from baton.v1 import router_pb2


async def get(port, path="/metrics"):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.0\r\n\r\n".encode())
    text = (await reader.read()).decode()
    writer.close()
    return text


async def test_placements_and_predictions_are_counted(world):
    (port,) = ports.free_ports(1)
    kvstore = await world.kvstore()
    router = await world.router(await world.worker(state("w1")), kvstore=kvstore, metrics_listen=f"127.0.0.1:{port}")
    await world.publisher(kvstore, "w1", blocks=set(range(50)))
    await router.until_indexed(w1=50)
    placed = await router.place(1000, blocks(*range(50)))
    outcome = router_pb2.PlacementOutcome(placement_id=placed.placement_id, num_cached_tokens=640)
    await router.stub.Report(router_pb2.ReportRequest(outcomes=[outcome, outcome]))
    text = await get(port)
    assert metric(text, "baton_router_placements_total", prefill="local") == 1
    assert metric(text, "baton_router_place_seconds_count") == 1
    assert metric(text, "baton_router_predicted_cached_tokens_total") == 800
    assert metric(text, "baton_router_actual_cached_tokens_total") == 640
    assert metric(text, "baton_router_phantom_cached_tokens_total") == 160
    assert metric(text, "baton_router_workers_alive") == 1
    assert metric(text, "baton_router_index_blocks") == 50
    assert metric(text, "baton_router_index_connected") == 1
