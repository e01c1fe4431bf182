"""Cancels requests and kills workers at random phases of the KV hand-over. Measures leaks and their duration.

python tests/bench/transfer/churn.py --requests 10000 --seed 1
python tests/bench/transfer/churn.py --requests 16000 --batch 100    # ten thousand aborts
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import grpc

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from support.processes.worker_harness import Stream
from support.processes.worker_processes import WorkerProcess
from support.transfer.rig import SIM, TransferRig, transfer_rig

from baton.services.bench.report import facts_line, machine_facts, write_json
from baton.v1 import types_pb2, worker_pb2

BATCH = 50
_WAIT_SECONDS = 60.0
_GIVE_UP_SECONDS = 10.0  # after which blocks that are not free count as leaked
_SPREAD_SECONDS = 0.6  # in which a batch's requests arrive


@dataclass
class Churn:
    """The results so far."""

    outcomes: Counter[str] = field(default_factory=Counter)
    kills: Counter[str] = field(default_factory=Counter)
    num_wrong: int = 0  # answers that differ from the undisturbed run
    num_leaked: int = 0  # blocks that were not freed
    longest_seconds: float = 0.0  # until all blocks of the live workers were free
    most_stranded: int = 0
    transfers: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    @property
    def num_requests(self) -> int:
        return sum(self.outcomes.values())


class Churner:
    """Runs batches of requests on one rig."""

    def __init__(self, rig: TransferRig, seed: int, report: Churn, kill_every: int, batch: int) -> None:
        self._rig = rig
        self._rng = random.Random(seed)
        self._report = report
        self._kill_every = kill_every  # batches
        self._num_together = batch
        self._counted: dict[str, Mapping[str, int]] = {}

    async def run(self, num_requests: int) -> None:
        """Runs all batches. Fails only if a worker does not start. Everything else is in the report."""
        began = time.monotonic()
        sampling = asyncio.create_task(self._sample())
        number = 0
        while self._report.num_requests < num_requests:
            number += 1
            victim = self._rng.choice(self._rig.workers) if number % self._kill_every == 0 else None
            await self._batch(min(self._num_together, num_requests - self._report.num_requests), victim)
        sampling.cancel()
        await self._count_transfers()
        self._report.seconds = time.monotonic() - began

    async def _batch(self, count: int, victim: WorkerProcess | None) -> None:
        async with self._rig.relay() as (_, endpoint), self._rig.decode.stream() as stream:
            submits = [self._submit(slot, endpoint) for slot in range(count)]
            whole_stream = victim is None and self._rng.random() < 0.1
            leaves = {slot for slot in range(count) if self._rng.random() < 0.6}
            tasks = [asyncio.create_task(self._arrive(stream, one, one.slot in leaves)) for one in submits]
            ending = asyncio.create_task(self._read(stream, count))
            if victim is not None:
                await asyncio.sleep(self._rng.uniform(0.0, _SPREAD_SECONDS))
                await self._count_transfers()
                await asyncio.to_thread(victim.kill)
                self._report.kills[victim.name] += 1
            elif whole_stream:
                await asyncio.sleep(self._rng.uniform(0.0, _SPREAD_SECONDS))
                stream.call.cancel()
            await asyncio.gather(*tasks)
            await ending
            lost = whole_stream or victim is self._rig.decode
            self._judge(stream, submits, lost)
            await self._wait_for_blocks([one for one in self._rig.workers if one is not victim])
            if victim is not None:
                await self._rig.restart(victim)
                self._counted.pop(victim.name, None)
            done = [one for one in submits if stream.slots[one.slot].finish and one.slot not in leaves]
            await self._compare(stream, self._rng.sample(done, min(4, len(done))))

    def _submit(self, slot: int, endpoint: types_pb2.Endpoint) -> worker_pb2.SubmitRequest:
        (one,) = self._rig.submits(1, self._rng.randrange(70, 500), self._rng.randrange(1, 16), slot, prefill=endpoint)
        return one

    async def _arrive(self, stream: Stream, one: worker_pb2.SubmitRequest, leaves: bool) -> None:
        await asyncio.sleep(self._rng.uniform(0.0, _SPREAD_SECONDS))
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, asyncio.CancelledError):
            await stream.send(one)
            if leaves:
                await asyncio.sleep(self._rng.uniform(0.0, 0.5))
                await stream.send(aborts=(one.slot,))

    async def _read(self, stream: Stream, count: int) -> None:
        """Reads until every request or the stream has ended."""
        with contextlib.suppress(grpc.aio.AioRpcError, AssertionError, asyncio.CancelledError):
            async with asyncio.timeout(_WAIT_SECONDS):
                while not all(stream.slots[slot].ended for slot in range(count)):
                    await stream.read()

    def _judge(self, stream: Stream, submits: list[worker_pb2.SubmitRequest], lost: bool) -> None:
        for one in submits:
            slot = stream.slots[one.slot]
            if slot.finish is not None:
                aborted = slot.finish.reason == types_pb2.FINISH_REASON_ABORT
                kind = "cancelled" if aborted else "finished"
            elif slot.failure is not None:
                kind = "failed"
            else:
                kind = "lost with its stream" if lost else "never ended"
            self._report.outcomes[kind] += 1

    async def _wait_for_blocks(self, workers: list[WorkerProcess]) -> None:
        began = time.monotonic()
        for worker in workers:
            while True:
                stats = await worker.stats()
                num_left = stats.num_held_blocks + stats.num_leased_blocks
                took = time.monotonic() - began
                if not num_left or took > _GIVE_UP_SECONDS:
                    break
                await asyncio.sleep(0.02)
            self._report.num_leaked += num_left
            self._report.longest_seconds = max(self._report.longest_seconds, took)

    async def _compare(self, stream: Stream, submits: list[worker_pb2.SubmitRequest]) -> None:
        expected = await self._rig.undisturbed(submits)
        wrong = [one for one, tokens in zip(submits, expected, strict=True) if stream.slots[one.slot].tokens != tokens]
        self._report.num_wrong += len(wrong)

    async def _sample(self) -> None:
        while True:
            for worker in self._rig.workers:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    stranded = (await worker.stats(2.0)).counters.transfers.num_stranded_blocks
                    self._report.most_stranded = max(self._report.most_stranded, stranded)
            await asyncio.sleep(0.25)

    async def _count_transfers(self) -> None:
        """Adds the workers' counters since the last call. It is also called before a worker is killed."""
        for worker in self._rig.workers:
            counters = (await worker.stats()).counters
            transfers = counters.transfers
            now = {
                "transfers completed": transfers.num_transfers,
                "transfers ended early": transfers.num_failed_transfers,
                "tried again": transfers.num_retries,
                "leases expired": transfers.num_expired_leases,
                "local prefills instead": counters.num_local_fallbacks,
            }
            before = self._counted.get(worker.name, {})
            self._report.transfers.update({name: value - before.get(name, 0) for name, value in now.items()})
            self._counted[worker.name] = now


def churn(num_requests: int, seed: int, transports: str = "tcp", kill_every: int = 8, batch: int = BATCH) -> Churn:
    """Runs the churn on new workers. Returns the report."""
    report = Churn()
    with (
        tempfile.TemporaryDirectory() as folder,
        transfer_rig(Path(folder), {**SIM, "num_blocks": 3000}, transports) as rig,
    ):
        asyncio.run(Churner(rig, seed, report, kill_every, batch).run(num_requests))
    return report


def table(report: Churn) -> str:
    """Returns the printed table."""
    rows = [("requests", report.num_requests)]
    rows += [(f"  {name}", count) for name, count in sorted(report.outcomes.items())]
    rows += [(f"kill -9 of worker {name}, and restart", count) for name, count in sorted(report.kills.items())]
    rows += list(report.transfers.items())
    rows += [("answers with a wrong token", report.num_wrong), ("blocks leaked", report.num_leaked)]
    rows += [("most stranded blocks in the metric", report.most_stranded)]
    lines = [f"{name:<44} {count:>9}" for name, count in rows]
    lines.append(f"{'longest until all blocks were back':<44} {report.longest_seconds:>7.2f} s")
    lines.append(f"{'duration':<44} {report.seconds:>7.0f} s")
    return "\n".join(lines)


def main() -> int:
    """Returns 0 if nothing leaked, all answers were right, and all blocks were free within 2 s."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--transports", default="tcp")
    parser.add_argument("--batch", type=int, default=BATCH, help="concurrent requests")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    report = churn(options.requests, options.seed, options.transports, batch=options.batch)
    facts = machine_facts(("grpcio",))
    print(f"KV hand-over churn, {options.transports}, seed {options.seed}; {facts_line(facts)}")
    print(table(report))
    figures = {name: dict(value) if isinstance(value, Counter) else value for name, value in vars(report).items()}
    write_json(options.json, {"facts": facts, "seed": options.seed, **figures})
    return int(not clean(report))


def clean(report: Churn) -> bool:
    """Returns whether the report meets all requirements."""
    bad = report.num_wrong, report.num_leaked, report.most_stranded, report.outcomes["never ended"]
    return not any(bad) and report.outcomes["failed"] == 0 and report.longest_seconds < 2.0


if __name__ == "__main__":
    sys.exit(main())
