"""A kvstore's metrics."""

import asyncio

from support.fleet.kvstore_node import eventually, stored
from support.processes import ports
from support.processes.stack import metric


async def get(port):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
    text = (await reader.read()).decode()
    writer.close()
    return text


async def test_sizes_events_and_faults_are_counted(redis_server, start_kvstore, connect):
    (port,) = ports.free_ports(1)
    kvstore = await start_kvstore(redis_url=redis_server.url, metrics_listen=f"127.0.0.1:{port}", redis_timeout_ms=200)
    await connect.replica(kvstore)
    worker = await connect.worker(kvstore, blocks={1, 2})
    await worker.join()
    await worker.store(3)
    await worker.remove(1)

    async def counted(name, expected):
        await eventually(lambda: _is(port, name, expected), f"{name} is {expected}")

    await counted("baton_kvstore_block_events_total", 2)
    text = await get(port)
    assert metric(text, "baton_kvstore_workers") == 1
    assert metric(text, "baton_kvstore_blocks") == 2
    assert metric(text, "baton_kvstore_watchers") == 1
    assert metric(text, "baton_kvstore_store_up") == 1
    assert metric(text, "baton_kvstore_wanted_snapshots_total") == 1
    redis_server.stop()
    worker.sequence += 1
    await worker.batch(stored(5))
    await counted("baton_kvstore_wanted_snapshots_total", 2)
    await counted("baton_kvstore_store_up", 0)
    assert metric(await get(port), "baton_kvstore_store_errors_total", kind="unreachable") >= 1


async def _is(port, name, expected):
    return metric(await get(port), name) == expected
