"""Measures the prefix index: events per core, lookups, memory, warm start, and idle cost.

baton bench index [--workers 64] [--blocks 10000000] [--idle-workers 100] [--json PATH] [--markdown]

The kvstore, its Redis and the router's reader are separate processes. CPU is that of the whole process. Events count
when the reader has applied them. Lookups and memory are measured in this process, on the router's class.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import redis

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.router.bench_router import Row, percentile, start
from bench.router.index_clients import BATCH_BLOCKS, Publisher, Reader, joined, redis_server
from support.fleet.fleet_node import ScriptedWorker, state
from support.processes import ports

from baton.router.index.prefix_index import PrefixIndex
from baton.services.bench.report import facts_line, machine_facts, render_table, write_json
from baton.v1 import index_pb2, kv_pb2

PROMPT_BLOCKS = 1563  # 100 k tokens in blocks of 64
PROMPTS = 200
TURN_BATCHES = 8  # of BATCH_BLOCKS each, as the router applies them at once


def main() -> None:
    """Measures, and prints one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=10_000_000, help="entries in the index, over all workers")
    parser.add_argument("--events", type=int, default=1_000_000, help="block events to send")
    parser.add_argument("--lookups", type=int, default=5000)
    parser.add_argument("--idle-workers", type=int, default=100)
    parser.add_argument("--idle-seconds", type=float, default=20.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    facts = machine_facts(("numpy", "grpcio", "protobuf"))
    rows = [*measure_memory_and_lookups(options), *measure_apply(), *asyncio.run(measure_services(options))]
    cells = [(row.what, f"{row.value:,.{1 if row.value < 1000 else 0}f}", row.unit) for row in rows]
    print(facts_line(facts))
    print(render_table(("what", "figure", "unit"), cells, markdown=options.markdown))
    write_json(
        options.json, {"facts": facts, "rows": [{"what": r.what, "value": r.value, "unit": r.unit} for r in rows]}
    )


def measure_memory_and_lookups(options: argparse.Namespace) -> list[Row]:
    """Measures an index of the given size. Each worker has cached some prompts to some depth."""
    draw = random.Random(1)
    prompts = [draw.randbytes(16 * PROMPT_BLOCKS) for _ in range(PROMPTS)]
    before = psutil.Process().memory_info().rss
    index = PrefixIndex()
    for number in range(options.workers):
        own = [prompt[: 16 * draw.randint(1, PROMPT_BLOCKS)] for prompt in draw.sample(prompts, PROMPTS // 4)]
        rest = options.blocks // options.workers - sum(map(len, own)) // 16
        fill(index, f"w{number}", b"".join(own), draw.randbytes(16 * max(0, rest)))
    entries = sum(map(index.num_blocks, index.worker_ids))
    taken = psutil.Process().memory_info().rss - before
    at = f"{options.workers} workers, {entries / 1e6:.1f} M entries, {len(index) / 1e6:.1f} M distinct"
    rows = [Row(f"router memory a block and worker, {at}", taken / entries, "bytes")]
    quiet = [timed(partial(index.lookup, draw.choice(prompts))) for _ in range(options.lookups)]
    rows += latencies("lookup of 1,563 blocks, index at rest", quiet)
    foreign = [timed(partial(index.lookup, draw.randbytes(16 * PROMPT_BLOCKS))) for _ in range(options.lookups // 5)]
    rows += latencies("lookup of 1,563 blocks that nobody holds", foreign)
    busy, turns, rate = lookups_under_updates(index, prompts, options)
    rows += latencies(f"lookup between updates, {rate / 1e3:.0f} k block events a second", busy)
    rows += latencies("the turn of 256 events that a lookup may wait for", turns)
    began = time.perf_counter()
    index.drop("w0")
    rows.append(Row("drop of a worker: until its entries count no more", (time.perf_counter() - began) * 1e6, "us"))
    scattered = store_scattered(index, draw)
    took = [timed(partial(index.lookup, draw.choice(scattered))) for _ in range(options.lookups // 5)]
    return rows + latencies("lookup of 1,563 blocks that came one by one between those of 39 other prompts", took)


def store_scattered(index: PrefixIndex, draw: random.Random) -> list[bytes]:
    """Stores prompts at a new worker, with no two blocks of a prompt in one batch. Returns the prompts."""
    while index.clean(1_000_000):
        pass
    fill(index, "w0", b"")
    prompts = [draw.randbytes(16 * PROMPT_BLOCKS) for _ in range(40)]
    for number in range(PROMPT_BLOCKS):
        events = [
            kv_pb2.KvEvent(stored=kv_pb2.BlocksStored(block_hashes=one[16 * number : 16 * number + 16], tier=1))
            for one in draw.sample(prompts, len(prompts))
        ]
        assert index.apply(kv_pb2.KvEventBatch(worker_id="w0", epoch=1, sequence=number + 1, events=events))
    return prompts


def fill(index: PrefixIndex, worker_id: str, *pieces: bytes) -> None:
    """Applies a worker's snapshot in parts, as the kvstore sends it."""
    stride = 16 * 8192
    parts = [piece[at : at + stride] for piece in pieces for at in range(0, len(piece), stride)] or [b""]
    for number, part in enumerate(parts):
        index.receive(
            kv_pb2.KvSnapshot(
                worker_id=worker_id, epoch=1, block_hashes=part, tier=kv_pb2.KV_TIER_DEVICE,
                first=number == 0, last=number == len(parts) - 1,
            )
        )  # fmt: skip


def lookups_under_updates(
    index: PrefixIndex, prompts: list[bytes], options: argparse.Namespace
) -> tuple[list[Took], list[Took], float]:
    """Looks up 1,000 prompts a second while workers evict and store 300,000 blocks a second."""
    draw = random.Random(2)
    sequences = dict.fromkeys(index.worker_ids, 0)
    stored: list[tuple[str, bytes]] = []
    lookups: list[Took] = []
    turns: list[Took] = []
    num_events = 0
    began = time.perf_counter()
    while len(lookups) < options.lookups:
        behind = 300_000 * (time.perf_counter() - began) - num_events
        if behind >= TURN_BATCHES * BATCH_BLOCKS:
            batches = [next_batch(draw, sequences, stored) for _ in range(TURN_BATCHES)]
            turns.append(timed(partial(index.apply_all, batches)))
            num_events += TURN_BATCHES * BATCH_BLOCKS
        if 1000 * (time.perf_counter() - began) > len(lookups):
            lookups.append(timed(partial(index.lookup, draw.choice(prompts))))
    return lookups, turns, num_events / (time.perf_counter() - began)


def next_batch(draw: random.Random, sequences: dict[str, int], stored: list[tuple[str, bytes]]) -> kv_pb2.KvEventBatch:
    """Returns a batch in which a worker stores 16 blocks and, if enough are stored, evicts 16."""
    worker_id = draw.choice(list(sequences))
    hashes = draw.randbytes(16 * BATCH_BLOCKS // 2)
    tier = kv_pb2.KV_TIER_DEVICE
    events = [kv_pb2.KvEvent(stored=kv_pb2.BlocksStored(block_hashes=hashes, tier=tier))]
    stored.append((worker_id, hashes))
    if len(stored) > 10_000:
        worker_id, old = stored.pop(0)
        events = [kv_pb2.KvEvent(removed=kv_pb2.BlocksRemoved(block_hashes=old, tier=tier)), *events]
    sequences[worker_id] += 1
    return kv_pb2.KvEventBatch(worker_id=worker_id, epoch=1, sequence=sequences[worker_id], events=events)


def measure_apply() -> list[Row]:
    """Measures parsing and applying of encoded messages by the router's class: stored, then removed events."""
    rows = []
    for num_workers, what in ((8, "8 batches of 32 blocks at once"), (1, "one batch of 32 blocks at once")):
        draw, index = random.Random(3), PrefixIndex()
        messages = []
        hashes = [draw.randbytes(16 * BATCH_BLOCKS) for _ in range(6400)]
        for number in range(num_workers):
            fill(index, f"w{number}", b"\0" * 16)
        for stores in (True, False):
            for start_at in range(0, len(hashes), num_workers):
                messages.append(message(hashes, start_at, num_workers, stores, len(messages) + 1))
        began = time.process_time()
        for encoded in messages:
            assert not index.apply_all(index_pb2.WatchResponse.FromString(encoded).batches)
        cpu = time.process_time() - began
        assert len(index) == 1
        rows.append(Row(f"block events applied by the router's index, {what}", 2 * 6400 * 32 / cpu, "/s and core"))
    return rows


def message(hashes: list[bytes], start_at: int, num_workers: int, stores: bool, sequence: int) -> bytes:
    """Returns a message with one batch of each worker."""
    batches = []
    for number in range(num_workers):
        change = (kv_pb2.BlocksStored if stores else kv_pb2.BlocksRemoved)(
            block_hashes=hashes[start_at + number], tier=1
        )
        event = kv_pb2.KvEvent(stored=change) if stores else kv_pb2.KvEvent(removed=change)
        batches.append(kv_pb2.KvEventBatch(worker_id=f"w{number}", epoch=1, sequence=sequence, events=[event]))
    return index_pb2.WatchResponse(batches=batches).SerializeToString()


@dataclass(frozen=True)
class Took:
    """Microseconds of wall time, and of this thread's CPU time."""

    wall: float
    cpu: float


def timed(act: Callable[[], object]) -> Took:
    """Returns the duration of a call."""
    began, cpu = time.perf_counter_ns(), time.thread_time_ns()
    act()
    cpu, wall = time.thread_time_ns() - cpu, time.perf_counter_ns() - began
    return Took(wall / 1e3, cpu / 1e3)


def latencies(what: str, values: list[Took]) -> list[Row]:
    """Returns the median and the 99th percentile. Wall time includes waiting for processes that share the cores."""
    walls, cpus = [one.wall for one in values], [one.cpu for one in values]
    return [
        Row(f"{what}: p50", statistics.median(walls), "us"),
        Row(f"{what}: p99", percentile(walls, 99), "us"),
        Row(f"{what}: p99 of processor time", percentile(cpus, 99), "us"),
    ]


async def measure_services(options: argparse.Namespace) -> list[Row]:
    """Measures kvstore, Redis and reader as processes."""
    rows: list[Row] = []
    with ExitStack() as cleanup:
        log = cleanup.enter_context(tempfile.TemporaryFile())
        client, url = cleanup.enter_context(redis_server())
        rows += await measure_stream(options, log, client, url)
    with ExitStack() as cleanup:
        log = cleanup.enter_context(tempfile.TemporaryFile())
        _, url = cleanup.enter_context(redis_server())
        rows += await measure_usual_start(log, url)
    with ExitStack() as cleanup:
        log = cleanup.enter_context(tempfile.TemporaryFile())
        _, url = cleanup.enter_context(redis_server())
        rows += await measure_idle(options, log, url)
    return rows


async def measure_stream(options: argparse.Namespace, log: object, client: redis.Redis, url: str) -> list[Row]:
    """Measures warm starts with the whole index, then events through kvstore and reader."""
    (port,) = ports.free_ports(1)
    address = f"127.0.0.1:{port}"
    draw = np.random.default_rng(1)
    publishers = [Publisher(f"w{n}", options.blocks // options.workers, draw) for n in range(options.workers)]
    kvstore = start(log, "kvstore", "--listen", address, "--redis-url", url)
    rows: list[Row] = []
    reader: Reader | None = None
    try:
        async with joined(address, publishers):
            total = options.blocks // options.workers * options.workers
            reader = Reader(address)
            status = await reader.until(lambda one: bool(one["whole"]) and one["entries"] == total, 120)
            at = f"{total / 1e6:.0f} M blocks"
            rows.append(Row(f"warm start of a router, {at}: until everything counts", status["seconds"], "s"))
            rows.append(Row(f"warm start of a router, {at}: processor time", cpu_of(reader.process), "s"))
            rows.append(Row(f"kvstore memory a block and worker, {at}", kvstore.memory_info().rss / total, "bytes"))
            await until_written(client, options.workers)
            used = client.info("memory")["used_memory"]
            rows.append(Row(f"Redis memory a block and worker, {at}", used / total, "bytes"))
        rows += await measure_events(options, address, publishers, kvstore, reader)
        kvstore.terminate()
        kvstore.wait(20)
        began = time.perf_counter()
        kvstore = start(log, "kvstore", "--listen", address, "--redis-url", url)
        async with joined(address, publishers[:1]):
            loaded = time.perf_counter() - began
        rows.append(Row(f"start of a kvstore with {at} in Redis: until it serves", loaded, "s"))
    finally:
        if reader is not None:
            reader.end()
        kvstore.kill()
        kvstore.wait(10)
    return rows


async def measure_usual_start(log: object, url: str) -> list[Row]:
    """Measures the restart of a router with 16 workers and a million blocks."""
    (port,) = ports.free_ports(1)
    address, total = f"127.0.0.1:{port}", 16 * 62_500
    draw = np.random.default_rng(1)
    kvstore = start(log, "kvstore", "--listen", address, "--redis-url", url)
    times: list[float] = []
    try:
        async with joined(address, [Publisher(f"w{n}", 62_500, draw) for n in range(16)]):
            for _ in range(5):
                reader = Reader(address)
                try:
                    status = await reader.until(lambda one: bool(one["whole"]) and one["entries"] == total, 60)
                finally:
                    reader.end()
                times.append(status["seconds"])
    finally:
        kvstore.kill()
        kvstore.wait(10)
    return [Row("warm start of a router, 16 workers, 1 M blocks: the longest of five", max(times), "s")]


async def until_written(client: redis.Redis, num_workers: int) -> None:
    """Waits until Redis has a snapshot of every worker."""
    async with asyncio.timeout(60):
        while client.scard("baton:{baton}:workers") < num_workers:  # noqa: ASYNC110
            await asyncio.sleep(0.2)
    await asyncio.sleep(1)


async def measure_events(
    options: argparse.Namespace, address: str, publishers: list[Publisher], kvstore: psutil.Popen, reader: Reader
) -> list[Row]:
    """Measures batches of all workers, sent as fast as they are acknowledged, until the reader has applied the last."""
    per_worker = options.events // BATCH_BLOCKS // len(publishers)
    for publisher in publishers:
        await publisher.join(address)
    prepared = [publisher.batches(per_worker) for publisher in publishers]
    offered = per_worker * len(publishers) * BATCH_BLOCKS
    last = sum(publisher.sequence for publisher in publishers)
    before = [cpu_of(kvstore), cpu_of(reader.process)]
    began = time.perf_counter()
    await asyncio.gather(*(one.send(messages) for one, messages in zip(publishers, prepared, strict=True)))
    await reader.until(lambda one: one["sequences"] == last, 120)
    wall = time.perf_counter() - began
    used = [cpu_of(kvstore) - before[0], cpu_of(reader.process) - before[1]]
    for publisher in publishers:
        await publisher.close()
    at = f"{offered / 1e6:.1f} M offered and completed, batches of {BATCH_BLOCKS}"
    return [
        Row(f"block events over gRPC, {at}: kvstore, Redis writes included", offered / used[0], "/s and core"),
        Row("the same: router's reader, parsing and applying", offered / used[1], "/s and core"),
        Row("the same: from end to end, publishers on the same two cores", offered / wall, "/s"),
    ]


async def measure_idle(options: argparse.Namespace, log: object, url: str) -> list[Row]:
    """Measures a router and a kvstore whose workers only send heartbeats."""
    workers = [await ScriptedWorker(state(f"w{n}")).start() for n in range(options.idle_workers)]
    kvstore_port, router_port = ports.free_ports(2)
    address = f"127.0.0.1:{kvstore_port}"
    draw = np.random.default_rng(1)
    publishers = [Publisher(f"w{n}", 1000, draw) for n in range(options.idle_workers)]
    processes = [start(log, "kvstore", "--listen", address, "--redis-url", url)]
    try:
        async with joined(address, publishers):
            words = ("--kvstore", address, "--workers", ",".join(worker.address for worker in workers))
            processes.append(start(log, "router", "--listen", f"127.0.0.1:{router_port}", *words))
            await asyncio.sleep(8)
            before = [cpu_of(process) for process in processes]
            await asyncio.sleep(options.idle_seconds)
            used = [
                (cpu_of(process) - cpu) / options.idle_seconds for process, cpu in zip(processes, before, strict=True)
            ]
    finally:
        for process in processes:
            process.kill()
            process.wait(10)
        for worker in workers:
            await worker.stop()
    at = f"{options.idle_workers} idle workers"
    return [
        Row(f"kvstore, {at}: CPU, in thousandths", 1000 * used[0], "core"),
        Row(f"router, {at}: CPU, in thousandths", 1000 * used[1], "core"),
        Row(f"both, {at}: CPU, in thousandths", 1000 * sum(used), "core"),
    ]


def cpu_of(process: psutil.Process) -> float:
    """Returns the CPU seconds of a process so far."""
    return sum(process.cpu_times()[:2])


if __name__ == "__main__":
    import uvloop

    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    main()
