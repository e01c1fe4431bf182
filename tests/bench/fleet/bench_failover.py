"""Kills and stops workers of a simulated fleet under load. Measures what the clients of their streams see.

baton bench failover [--kills N] [--load 0.7] [--decode-workers N] [--seed N] [--faults LIST]
    [--json PATH]

A router, a gateway, prefill and decode workers run as processes. Streams (greedy, seeded, n = 2, JSON schema) occupy
the given share of the fleet's batch rows. Workers are killed (front or engine) or stopped (SIGSTOP of either) one by
one, and restarted. Every stream is compared with the same request's answer without faults.

gap  the longest wait between two events of a stream during a fault, if the wait begins within a second of the fault
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import psutil
from support.processes.engine_processes import engines_of
from support.processes.stack import MODEL_NAME, Service, Stack, metric, start_stack

from baton.services.bench.report import facts_line, machine_facts, render_table, write_json

_PLACES = 16  # rows of each worker's batch
_STEP_SECONDS = 0.02
_NUM_REQUESTS = 24
_GAP_WINDOW = 1.0  # seconds after a fault in which its gap begins
_SETTLE_SECONDS = 0.5
_FAULTS = ("front killed", "engine killed", "front stopped", "engine stopped", "prefill worker killed")
_WORDS = ("dog", "river", "girl", "tree", "boat", "king", "bird", "moon")
_NUMBERS = {"type": "array", "items": {"type": "integer", "minimum": 10, "maximum": 99}, "minItems": 30, "maxItems": 30}
_SCHEMA = {"type": "json_schema", "json_schema": {"name": "numbers", "strict": True, "schema": _NUMBERS}}
_KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "ignore_eos": True},
    {"temperature": 1.0, "ignore_eos": True},
    {"temperature": 1.0, "ignore_eos": True, "n": 2},
    {"temperature": 1.0, "response_format": _SCHEMA},
)
_MEAN_CHOICES = statistics.mean(kind.get("n", 1) for kind in _KINDS)


@dataclass
class Streamed:
    """One stream as its client saw it."""

    number: int  # the request's number
    parts: dict[int, str] = field(default_factory=dict)  # text and finish reason of each choice
    times: list[float] = field(default_factory=list)
    problem: str = ""


def request(number: int) -> dict[str, Any]:
    """Returns the request of this number, which is always the same."""
    words = random.Random(number).choices(_WORDS, k=120)
    kind = _KINDS[number % len(_KINDS)]
    fields = {"model": MODEL_NAME, "stream": True, "seed": number, "max_tokens": 200}
    return {**fields, **kind, "messages": [{"role": "user", "content": " ".join(words)}]}


async def stream(address: str, number: int) -> Streamed:
    """Runs one request to its end."""
    seen = Streamed(number)
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        body = json.dumps(request(number)).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        async with asyncio.timeout(120):
            status = await reader.readline()
            while line := await reader.readline():
                if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                    seen.times.append(time.monotonic())
                    _take(seen, json.loads(line[6:]))
            if b" 200 " not in status:
                seen.problem = status.decode().strip()
    except (OSError, TimeoutError, ValueError) as error:
        seen.problem = f"{type(error).__name__} {error}"
    finally:
        writer.close()
    return seen


def _take(seen: Streamed, chunk: dict[str, Any]) -> None:
    if "error" in chunk:
        seen.problem = str(chunk["error"].get("message"))
    for choice in chunk.get("choices", ()):
        told = (choice["delta"].get("content") or "") + (
            f" <{choice['finish_reason']}>" if choice["finish_reason"] else ""
        )
        seen.parts[choice["index"]] = seen.parts.get(choice["index"], "") + told


class Load:
    """Keeps this many streams running until stopped."""

    def __init__(self, address: str, concurrency: int) -> None:
        self._address = address
        self._numbers = (number % _NUM_REQUESTS for number in range(1 << 30))
        self._tasks = [asyncio.create_task(self._run()) for _ in range(concurrency)]
        self._stopping = False
        self.streams: list[Streamed] = []

    async def _run(self) -> None:
        while not self._stopping:
            self.streams.append(await stream(self._address, next(self._numbers)))

    async def stop(self) -> None:
        """Waits until running requests are complete."""
        self._stopping = True
        await asyncio.gather(*self._tasks)


def hurt(worker: Service, fault: str) -> None:
    """Applies the fault to a worker."""
    assert worker.process is not None
    front = worker.process.pid
    target = engines_of(front)[0] if "engine" in fault else psutil.Process(front)
    target.send_signal(signal.SIGSTOP if "stopped" in fault else signal.SIGKILL)


def mend(worker: Service) -> None:
    """Kills a worker's remaining processes and restarts it."""
    assert worker.process is not None
    worker.process.kill()
    worker.process.wait(20)
    worker.start()


def gap_at(seen: Streamed, fault_at: float) -> float | None:
    """Returns the longest wait that began or lasted around the fault. None: the stream did not run then."""
    if not seen.times or not seen.times[0] < fault_at < seen.times[-1]:
        return None
    pairs = zip(seen.times, seen.times[1:], strict=False)
    return max(
        (late - early for early, late in pairs if late > fault_at and early < fault_at + _GAP_WINDOW), default=None
    )


async def measure(stack: Stack, options: argparse.Namespace) -> dict[str, Any]:
    """Measures streams without faults, then under load with faults. Returns the figures."""
    rng = random.Random(options.seed)
    undisturbed = {}
    for first in range(0, _NUM_REQUESTS, 8):
        numbers = range(first, min(first + 8, _NUM_REQUESTS))
        for seen in await asyncio.gather(*(stream(stack.rest, number) for number in numbers)):
            undisturbed[seen.number] = seen
    assert not any(seen.problem for seen in undisturbed.values()), [seen.problem for seen in undisturbed.values()]
    load = Load(stack.rest, max(1, round(options.load * _PLACES * options.decode_workers / _MEAN_CHOICES)))
    faults: list[tuple[str, float]] = []
    await asyncio.sleep(2.0)
    for number in range(options.kills):
        wanted = options.faults.split(",")
        fault = wanted[number % len(wanted)]
        role = "prefill" if "prefill" in fault else "decode"
        worker = rng.choice([one for one in stack.workers if role in one.plan.name])
        faults.append((fault, time.monotonic()))
        await asyncio.to_thread(hurt, worker, fault)
        await asyncio.sleep(_SETTLE_SECONDS + 1.0)
        await asyncio.to_thread(mend, worker)
        await asyncio.sleep(_SETTLE_SECONDS)
    await load.stop()
    return _figures(load.streams, undisturbed, faults, stack)


def _figures(
    streams: list[Streamed], undisturbed: dict[int, Streamed], faults: list[tuple[str, float]], stack: Stack
) -> dict[str, Any]:
    same = [seen for seen in streams if not seen.problem and seen.parts == undisturbed[seen.number].parts]
    problems = [seen.problem for seen in streams if seen.problem]
    different = [seen.number for seen in streams if not seen.problem and seen.parts != undisturbed[seen.number].parts]
    gaps: dict[str, list[float]] = {fault: [] for fault in _FAULTS}
    for fault, at in faults:
        gaps[fault] += [gap for seen in streams if (gap := gap_at(seen, at)) is not None]
    _, metrics = stack.get("/metrics")
    names = ("failovers", "lost_worker_streams", "silent_workers", "poisonous_requests")
    return {
        "faults": len(faults),
        "streams": len(streams),
        "complete and identical": len(same),
        "failed": problems,
        "different": different,
        "gaps": gaps,
        "metrics": {name: metric(metrics, f"baton_gateway_{name}_total") for name in names},
    }


def _show(figures: dict[str, Any], options: argparse.Namespace) -> None:
    print(f"{facts_line(machine_facts(('grpcio',)))}, seed {options.seed}")
    print(
        f"{figures['faults']} faults, {options.decode_workers} decode workers at {options.load:.0%} load: "
        f"{figures['complete and identical']} of {figures['streams']} streams complete and token-identical"
    )
    print(", ".join(f"{name.replace('_', ' ')} {value:.0f}" for name, value in figures["metrics"].items()))
    for problem in figures["failed"][:5]:
        print(f"failed: {problem}")
    if figures["different"]:
        print(f"different: requests {figures['different'][:20]}")
    rows = []
    every = [gap for gaps in figures["gaps"].values() for gap in gaps]
    for fault, gaps in [*figures["gaps"].items(), ("all", every)]:
        if gaps:
            ranked = sorted(gaps)
            cells = (statistics.median(ranked), ranked[int(0.99 * (len(ranked) - 1))], ranked[-1])
            rows.append([fault, str(len(gaps)), *(f"{1000 * value:.0f}" for value in cells)])
    print(render_table(("gap, ms", "streams", "p50", "p99", "most"), rows))


def main() -> int:
    """Measures and prints. Returns 1 if a stream failed or differed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--load", type=float, default=0.7)
    parser.add_argument("--decode-workers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", default=",".join(_FAULTS), help="faults to cause in turn, of: %(default)s")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    flags = ("--max-num-requests", str(_PLACES), "--sim-step-seconds", str(_STEP_SECONDS))
    with ExitStack() as cleanup:
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory()))
        stack = start_stack(
            folder,
            cleanup,
            extra={"worker": flags},
            executor="sim",
            decode_workers=options.decode_workers,
            prefill_workers=1,
        )
        figures = asyncio.run(measure(stack, options))
    _show(figures, options)
    write_json(options.json, figures)
    return 1 if figures["failed"] or figures["different"] else 0


if __name__ == "__main__":
    sys.exit(main())
