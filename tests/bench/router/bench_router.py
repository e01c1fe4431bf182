"""Measures the prefix index and placement: applied events, lookups, Place over gRPC, memory, idle CPU.

baton bench router [--workers 64] [--blocks 1000000] [--requests 5000] [--rate 1000] [--json PATH]

The router of the Place and idle rows is a separate process. Its workers and the client share this one, so latencies
include a client in Python. CPU is that of the router's whole process. Placements are single calls (Place), and then
messages on the gateway's stream (PlaceStream).
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from support.fleet.fleet_node import ScriptedWorker, state
from support.fleet.kvstore_node import FakeWorker
from support.processes import ports

from baton.gateway.routers.link import RouterLink
from baton.kvstore.index.index import Index
from baton.router.index.prefix_index import PrefixIndex
from baton.rpc.channel import open_channel
from baton.v1 import kv_pb2, router_pb2, router_pb2_grpc

PROMPT_BLOCKS = 1563  # 100 k tokens in blocks of 64
BATCH_BLOCKS = 32

Place = Callable[[router_pb2.PlaceRequest], Awaitable[router_pb2.PlaceResponse]]


@dataclass(frozen=True)
class Row:
    """One figure."""

    what: str
    value: float
    unit: str


def main() -> None:
    """Measures, and prints one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=1_000_000, help="entries in the index, over all workers")
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--rate", type=float, default=1000.0, help="placements a second")
    parser.add_argument("--place-workers", type=int, default=16)
    parser.add_argument("--idle-seconds", type=float, default=10.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = [
        *measure_events(),
        *measure_lookups(options.workers, options.blocks),
        *asyncio.run(measure_services(options)),
    ]
    print(f"router and kvstore, {os.cpu_count()} cores, load {psutil.getloadavg()[0]:.1f}, seed 1")
    for row in rows:
        print(f"{row.what:<72} {row.value:>14,.1f} {row.unit}")
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


def random_blocks(draw: random.Random, count: int) -> bytes:
    """Returns random packed hashes."""
    return draw.randbytes(16 * count)


def measure_events() -> list[Row]:
    """Measures parsing and applying of encoded batches of 32 blocks: stored events, then removed ones."""
    draw = random.Random(1)
    encoded: list[bytes] = []
    hashes = [random_blocks(draw, BATCH_BLOCKS) for _ in range(5000)]
    for kind in ("stored", "removed"):
        for packed in hashes:
            change = (kv_pb2.BlocksStored if kind == "stored" else kv_pb2.BlocksRemoved)(block_hashes=packed, tier=1)
            event = kv_pb2.KvEvent(**{kind: change})
            batch = kv_pb2.KvEventBatch(worker_id="w", epoch=1, sequence=len(encoded) + 1, events=[event])
            encoded.append(batch.SerializeToString())
    empty = kv_pb2.KvSnapshot(worker_id="w", epoch=1, tier=1, first=True, last=True)
    rows = []
    for name, index in (("router's", PrefixIndex()), ("kvstore's", Index())):
        index.receive(empty)
        began = time.process_time()
        for data in encoded:
            index.apply(kv_pb2.KvEventBatch.FromString(data))
        rate = len(encoded) * BATCH_BLOCKS / (time.process_time() - began)
        rows.append(Row(f"block events applied by the {name} index", rate, "a second and core"))
    return rows


def measure_lookups(num_workers: int, num_entries: int) -> list[Row]:
    """Measures lookups of prompts that workers have cached to different depths, in an index of the given size."""
    draw = random.Random(1)
    before = psutil.Process().memory_info().rss
    index = PrefixIndex()
    prompts = [random_blocks(draw, PROMPT_BLOCKS) for _ in range(20)]
    for number in range(num_workers):
        own = [prompt[: 16 * draw.randint(1, PROMPT_BLOCKS)] for prompt in prompts]
        own[0] = prompts[0]
        rest = max(0, num_entries // num_workers - sum(map(len, own)) // 16)
        hashes = b"".join(own) + random_blocks(draw, rest)
        part = kv_pb2.KvSnapshot(worker_id=f"w{number}", epoch=1, block_hashes=hashes, tier=1, first=True, last=True)
        index.receive(part)
    entries = sum(index.num_blocks(f"w{number}") for number in range(num_workers))
    taken = psutil.Process().memory_info().rss - before
    times = [timed(index, draw.choice(prompts)) for _ in range(1000)]
    whole = [timed(index, prompts[0]) for _ in range(200)]
    foreign = [timed(index, random_blocks(draw, PROMPT_BLOCKS)) for _ in range(200)]
    at = f"{num_workers} workers, {entries / 1e6:.1f} M entries"
    return [
        Row(f"lookup of 1,563 blocks, {at}: p50", percentile(times, 50), "us"),
        Row(f"lookup of 1,563 blocks, {at}: p99", percentile(times, 99), "us"),
        Row("lookup of 1,563 blocks that all hold: p50", percentile(whole, 50), "us"),
        Row("lookup of 1,563 blocks that nobody holds: p50", percentile(foreign, 50), "us"),
        Row("memory of the router's index, by entry (block and worker)", taken / entries, "bytes"),
        Row("drop of one worker: until its entries count no more", drop_time(index), "us"),
    ]


def timed(index: PrefixIndex, prompt: bytes) -> float:
    """Returns the microseconds of one lookup."""
    began = time.perf_counter()
    index.lookup(prompt)
    return (time.perf_counter() - began) * 1e6


def drop_time(index: PrefixIndex) -> float:
    """Returns the microseconds until a worker's entries no longer count."""
    began = time.perf_counter()
    index.drop("w0")
    return (time.perf_counter() - began) * 1e6


def percentile(values: list[float], percent: int) -> float:
    return statistics.quantiles(values, n=100)[percent - 1]


async def measure_services(options: argparse.Namespace) -> list[Row]:
    """Measures Place over gRPC at a fixed rate, and both services when idle."""
    draw = random.Random(1)
    num_workers = options.place_workers
    workers = [await ScriptedWorker(state(f"w{number}", num_running=4)).start() for number in range(num_workers)]
    kvstore_port, router_port = ports.free_ports(2)
    kvstore, router = f"127.0.0.1:{kvstore_port}", f"127.0.0.1:{router_port}"
    addresses = ",".join(worker.address for worker in workers)
    with tempfile.TemporaryFile() as log:
        processes = [
            start(log, "kvstore", "--listen", kvstore),
            start(log, "router", "--listen", router, "--kvstore", kvstore, "--workers", addresses),
        ]
        try:
            prompts = [random_blocks(draw, 256) for _ in range(64)]
            beats: list[asyncio.Task] = []
            publishers = await publish(kvstore, prompts, num_workers, draw, beats)
            async with open_channel(router) as channel:
                stub = router_pb2_grpc.RouterServiceStub(channel)
                await until_ready(stub, num_workers)
                rows = await measure_place("Place", call_by_call(stub), stub, prompts, options, processes[1])
                link = RouterLink(router)
                rows += await measure_place("PlaceStream", on_stream(link), stub, prompts, options, processes[1])
                await link.close()
            await asyncio.sleep(1)
            rows += await measure_idle(processes, options.idle_seconds, num_workers)
            for beat in beats:
                beat.cancel()
            for publisher in publishers:
                await publisher.close()
        except BaseException:
            log.seek(0)
            print(log.read().decode(errors="replace")[-4000:], file=sys.stderr)
            raise
        finally:
            for process in processes:
                process.terminate()
                process.wait(10)
            for worker in workers:
                await worker.stop()
    return rows


def start(log: object, *words: str) -> psutil.Popen:
    """Starts a service as a process."""
    return psutil.Popen([sys.executable, "-m", "baton.services.cli", *words], stdout=log, stderr=subprocess.STDOUT)


async def publish(
    address: str, prompts: list[bytes], num_workers: int, draw: random.Random, beats: list[asyncio.Task]
) -> list[FakeWorker]:
    """Publishes every prompt from a few workers, to some depth. These workers then send heartbeats."""
    publishers = []
    for number in range(num_workers):
        worker = FakeWorker(address, f"w{number}", epoch=1)
        for _ in range(100):
            try:
                await (await worker.connect()).join()
                break
            except (AssertionError, ConnectionError, TimeoutError):
                await asyncio.sleep(0.1)
            except Exception:
                await worker.close()
                await asyncio.sleep(0.1)
        for prompt in draw.sample(prompts, 16):
            worker.sequence += 1
            stored = kv_pb2.BlocksStored(block_hashes=prompt[: 16 * draw.randint(1, 256)], tier=1)
            events = [kv_pb2.KvEvent(stored=stored)]
            batch = kv_pb2.KvEventBatch(worker_id=worker.worker_id, epoch=1, sequence=worker.sequence, events=events)
            await worker.send_batch(batch)
        publishers.append(worker)
        beats.append(asyncio.create_task(heartbeats(worker)))
    return publishers


async def heartbeats(publisher: FakeWorker) -> None:
    """Sends heartbeats like an idle worker."""
    while True:
        await publisher.heartbeat()
        await asyncio.sleep(0.5)


async def until_ready(stub: router_pb2_grpc.RouterServiceStub, num_workers: int) -> None:
    """Waits until the router is connected to all workers and has the whole index."""
    for _ in range(200):
        try:
            response = await stub.ListWorkers(router_pb2.ListWorkersRequest(), timeout=2)
            if sum(entry.alive and entry.num_indexed_blocks > 0 for entry in response.workers) == num_workers:
                return
        except Exception:
            pass
        await asyncio.sleep(0.1)
    raise SystemExit("the router did not become ready")


def call_by_call(stub: router_pb2_grpc.RouterServiceStub) -> Place:
    """Returns a function that places with single calls."""

    async def place(request: router_pb2.PlaceRequest) -> router_pb2.PlaceResponse:
        return await stub.Place(request, timeout=10)

    return place


def on_stream(link: RouterLink) -> Place:
    """Returns a function that places on one stream, as a gateway does."""

    async def place(request: router_pb2.PlaceRequest) -> router_pb2.PlaceResponse:
        return await link.place(request, timeout=10)

    return place


async def measure_place(
    way: str,
    ask: Place,
    stub: router_pb2_grpc.RouterServiceStub,
    prompts: list[bytes],
    options: argparse.Namespace,
    router: psutil.Popen,
) -> list[Row]:
    """Measures placements of independent requests of 256 blocks, each with a report after its placement."""
    draw = random.Random(2)
    times: list[float] = []

    async def place(number: int) -> None:
        request = router_pb2.PlaceRequest(
            request_id=str(number), model="m", num_prompt_tokens=256 * 16, max_tokens=100,
            block_hashes=draw.choice(prompts),
        )  # fmt: skip
        began = time.perf_counter()
        response = await ask(request)
        times.append((time.perf_counter() - began) * 1000)
        outcome = router_pb2.PlacementOutcome(placement_id=response.placement_id, num_output_tokens=100)
        reports.append(outcome)

    async def report(outcomes: list[router_pb2.PlacementOutcome]) -> None:
        await stub.Report(router_pb2.ReportRequest(outcomes=outcomes))

    reports: list[router_pb2.PlacementOutcome] = []
    cpu = sum(router.cpu_times()[:2])
    gc.collect()
    gc.disable()  # a collection would delay the client by ten placements
    began = time.perf_counter()
    tasks = []
    due = began
    for number in range(options.requests):
        due += draw.expovariate(options.rate)
        if (delay := due - time.perf_counter()) > 0:
            await asyncio.sleep(delay)
        tasks.append(asyncio.create_task(place(number)))
        if len(reports) >= 64:
            batch, reports[:] = list(reports), []
            tasks.append(asyncio.create_task(report(batch)))
    await asyncio.gather(*tasks)
    elapsed = time.perf_counter() - began
    gc.enable()
    cpu = sum(router.cpu_times()[:2]) - cpu
    at = f"{options.rate:.0f} a second offered, {options.requests / elapsed:.0f} done, {options.place_workers} workers"
    return [
        Row(f"{way}, 256 blocks, {at}: p50", percentile(times, 50), "ms"),
        Row(f"{way}: p99", percentile(times, 99), "ms"),
        Row(f"{way}: router CPU a request, reports included", cpu / options.requests * 1e6, "us"),
    ]


async def measure_idle(processes: list[psutil.Popen], seconds: float, num_workers: int) -> list[Row]:
    """Returns CPU and memory of both services while workers only send heartbeats."""
    everyone = [psutil.Process(process.pid) for process in processes]
    everyone += [child for one in everyone for child in one.children(recursive=True)]
    before = [sum(one.cpu_times()[:2]) for one in everyone]
    await asyncio.sleep(seconds)
    rows = []
    for one, cpu in zip(everyone, before, strict=True):
        name = "redis" if "redis" in one.name() else one.cmdline()[3]
        used = (sum(one.cpu_times()[:2]) - cpu) / seconds * 100
        rows.append(Row(f"idle {name}, {num_workers} workers: CPU", used, "% of a core"))
        rows.append(Row(f"idle {name}: RSS", one.memory_info().rss / 1e6, "MB"))
    return rows


if __name__ == "__main__":
    import uvloop

    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    main()
