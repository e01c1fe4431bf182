"""Measures what the token stream costs a worker's front, with many requests and an engine whose steps take no time.

baton bench wire [--seconds 10] [--requests 256] [--rounds 3] [--tls] [--json PATH]

--tls also measures mTLS, in turns, and prints the difference.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc
import psutil
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from support.network.tls_rig import dial_as, make_certs
from support.processes.ports import free_ports
from support.processes.stack import scheduled_seconds
from support.processes.worker_harness import submit

from baton.rpc.channel import Dial
from baton.rpc.identity.identity import GATEWAY, WORKER
from baton.services.certs.command import tls_flags
from baton.services.up.readiness import is_ready
from baton.services.up.tandem import Probe
from baton.v1 import worker_pb2, worker_pb2_grpc

_PROMPT_TOKENS = 32
_MAX_TOKENS = 4000
_ALL_CPU = ("front_cpu", "engine_cpu", "client_cpu")


@dataclass(frozen=True)
class Round:
    """The results of one interval."""

    seconds: float
    num_tokens: int
    num_frames: int  # messages on the stream
    num_steps: int  # steps of the engine
    front_cpu: float  # seconds
    engine_cpu: float
    client_cpu: float

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds

    def per_core(self, cpu: float) -> float:
        """Returns the tokens per second of a process's CPU time."""
        return self.num_tokens / cpu


def main() -> None:
    """Starts a worker, drains its stream, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--step-ms", type=float, default=0.0, help="duration of a step")
    parser.add_argument("--tls", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with contextlib.ExitStack() as cleanup:
        ways: list[tuple[tuple[str, ...], Dial]] = [((), Dial())]
        if options.tls:
            folder = make_certs(Path(cleanup.enter_context(tempfile.TemporaryDirectory())))
            ways.append((tls_flags(str(folder), WORKER), dial_as(folder, GATEWAY, WORKER)))
        sides = []
        for flags, dial in ways:
            address = f"127.0.0.1:{free_ports(1)[0]}"
            front = cleanup.enter_context(_worker(address, options.requests, options.step_ms, flags))
            sides.append((address, dial, front))
        rounds = uvloop.run(_measure_all(sides, options.requests, options.seconds, options.rounds))
    for name, of_side in zip(("plain text", "mTLS"), rounds, strict=False):
        _print(name, of_side, options.requests)
    if options.tls:
        _print_added(*rounds)
    if options.json:
        options.json.write_text(json.dumps([[asdict(one) for one in of_side] for of_side in rounds], indent=1))


Side = tuple[str, Dial, psutil.Process]


async def _measure_all(sides: list[Side], num_requests: int, seconds: float, num_rounds: int) -> list[list[Round]]:
    """Returns the rounds of each side. The sides take turns."""
    for address, dial, _ in sides:
        async with asyncio.timeout(30):
            while not await is_ready(Probe.GRPC_HEALTH, address, dial):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
    rounds: list[list[Round]] = [[] for _ in sides]
    for number in range(num_rounds):
        turns = list(zip(sides, rounds, strict=True))
        for (address, dial, front), of_side in turns if number % 2 == 0 else turns[::-1]:
            of_side.append(await _measure(address, dial, front, num_requests, seconds))
    return rounds


@contextlib.contextmanager
def _worker(address: str, num_requests: int, step_ms: float, flags: tuple[str, ...]) -> Iterator[psutil.Process]:
    words = [sys.executable, "-m", "baton.services.cli", "worker", "--executor", "sim", "--role", "decode"]
    words += ["--listen", address, "--model", "none", "--max-num-requests", str(num_requests)]
    words += ["--num-blocks", str(num_requests * (_PROMPT_TOKENS + _MAX_TOKENS) // 16 + num_requests)]
    words += ["--sim-slowness", "1" if step_ms else "0", "--sim-step-seconds", str(step_ms / 1000)]
    words += ["--log-level", "warning", *flags]
    process = subprocess.Popen(words)
    try:
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(20)


async def _measure(address: str, dial: Dial, front: psutil.Process, num_requests: int, seconds: float) -> Round:
    async with dial(address) as channel:
        (engine,) = front.children()
        client = psutil.Process()
        call = worker_pb2_grpc.WorkerServiceStub(channel).GenerateStream(wait_for_ready=True)
        counts = _drain(call, num_requests)
        await _take(counts, 1.0)
        before, began = [scheduled_seconds(one) for one in (front, engine, client)], time.perf_counter()
        tokens, frames, steps = await _take(counts, seconds)
        elapsed = time.perf_counter() - began
        used = [scheduled_seconds(one) - cpu for one, cpu in zip((front, engine, client), before, strict=True)]
        call.cancel()
        return Round(elapsed, tokens, frames, steps, *used)


async def _drain(
    call: grpc.aio.StreamStreamCall[worker_pb2.GenerateStreamRequest, worker_pb2.GenerateStreamResponse], count: int
) -> AsyncIterator[tuple[int, int]]:
    """Keeps `count` requests active. Yields each frame's tokens and step."""
    await call.write(worker_pb2.GenerateStreamRequest(submits=[_request(slot) for slot in range(count)]))
    while True:
        frame = await call.read()
        if frame is grpc.aio.EOF:
            raise SystemExit(f"the stream ended: {await call.code()} {await call.details()}")
        if frame.failures:
            raise SystemExit(f"a request failed: {frame.failures[0].message}")
        yield len(frame.token_ids), frame.step
        if frame.finishes:
            again = [_request(finish.slot) for finish in frame.finishes]
            await call.write(worker_pb2.GenerateStreamRequest(submits=again))


def _request(slot: int) -> worker_pb2.SubmitRequest:
    prompt = [5 + (slot * 7 + i * 13) % 4000 for i in range(_PROMPT_TOKENS)]
    # Lengths vary, so that requests do not end and restart all at once.
    return submit(slot, prompt, max_tokens=_MAX_TOKENS - slot * 7 % 1000)


async def _take(counts: AsyncIterator[tuple[int, int]], seconds: float) -> tuple[int, int, int]:
    """Returns tokens, frames and steps of this many seconds."""
    deadline = time.perf_counter() + seconds
    num_tokens = num_frames = first = last = 0
    async for tokens, step in counts:
        num_tokens += tokens
        num_frames += 1
        first, last = first or step, step
        if time.perf_counter() > deadline:
            break
    return num_tokens, num_frames, last - first + 1


def _print(name: str, rounds: list[Round], num_requests: int) -> None:
    print(
        f"wire, {name}: {num_requests} active requests on one stream, {len(rounds)} rounds of "
        f"{rounds[0].seconds:.0f} s, {psutil.cpu_count()} cores, load {psutil.getloadavg()[0]:.1f}; "
        "median (least .. most)"
    )
    rows = (
        ("tokens/s", [one.tokens_per_second for one in rounds]),
        ("tokens/s per core of worker-front CPU", [one.per_core(one.front_cpu) for one in rounds]),
        ("tokens/s per core of engine CPU", [one.per_core(one.engine_cpu) for one in rounds]),
        ("tokens/s per core of client CPU", [one.per_core(one.client_cpu) for one in rounds]),
        ("front CPU us a frame", [one.front_cpu / one.num_frames * 1e6 for one in rounds]),
        ("engine steps a frame", [one.num_steps / one.num_frames for one in rounds]),
        ("front CPU, % of a core", [one.front_cpu / one.seconds * 100 for one in rounds]),
    )
    for name, values in rows:
        print(f"{name:<40} {statistics.median(values):>12,.2f}   ({min(values):,.2f} .. {max(values):,.2f})")


def _print_added(plain: list[Round], tls: list[Round]) -> None:
    """Prints the CPU time that TLS adds per frame, over all rounds and by round."""
    print("what mTLS adds to the CPU of a frame: all rounds together; median of rounds (quarter .. three quarters)")
    for name, fields in (
        ("front", ("front_cpu",)),
        ("client", ("client_cpu",)),
        ("front, engine and client", _ALL_CPU),
    ):
        added = [_added([one], [other], fields) for one, other in zip(tls, plain, strict=True)]
        low, middle, high = statistics.quantiles(added, n=4, method="inclusive") if len(added) > 1 else added * 3
        print(f"{name:<40} {_added(tls, plain, fields):>+11.1f} %   {middle:+.1f} % ({low:+.1f} .. {high:+.1f})")


def _added(tls: list[Round], plain: list[Round], fields: Sequence[str]) -> float:
    return 100 * (_per_frame(tls, fields) / _per_frame(plain, fields) - 1)


def _per_frame(rounds: list[Round], fields: Sequence[str]) -> float:
    cpu = sum(float(getattr(one, name)) for one in rounds for name in fields)
    return cpu / sum(one.num_frames for one in rounds)


if __name__ == "__main__":
    main()
