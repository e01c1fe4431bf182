"""A prefill and a decode worker as processes, with a proxy for their KV connections and a relay for their messages."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from support.network.byte_proxy import ByteProxy
from support.processes import ports
from support.processes.worker_harness import Slot, sampling, submit
from support.processes.worker_processes import WorkerProcess
from support.transfer.prefill_relay import PrefillRelay

from baton.v1 import types_pb2, worker_pb2

TRANSPORTS = ("tcp", "ipc")  # of workers without a GPU
BACK_SECONDS = 2.0  # after any fault, all blocks of live workers must be free within this time

# One prompt token takes half a millisecond, so that a fault can hit any phase of a prefill of 300 ms.
SIM: Mapping[str, object] = {
    "executor": "sim", "model": "none", "sim_step_seconds": 2e-3, "sim_prefill_token_seconds": 5e-4,
    "sim_decode_request_seconds": 1e-5,
}  # fmt: skip
CPU: Mapping[str, object] = {"executor": "cpu", "model": "models/storyteller-7m", "threads": 1, "num_blocks": 1500}

_REFERENCE_BATCH = 24  # concurrent requests of the undisturbed run, so that each batch takes seconds

_salts = itertools.count(random.SystemRandom().randrange(1 << 30))


@dataclass(eq=False)
class TransferRig:
    """Both workers, the proxy and the relay."""

    prefill: WorkerProcess
    decode: WorkerProcess
    proxy: ByteProxy  # in front of the decode worker's transfer listener
    transports: str = "tcp"
    vocab_size: int = 4000

    @property
    def workers(self) -> tuple[WorkerProcess, WorkerProcess]:
        return self.prefill, self.decode

    def prompt(self, num_tokens: int) -> list[int]:
        """Returns a new prompt."""
        rng = random.Random(next(_salts))
        return [rng.randrange(5, self.vocab_size) for _ in range(num_tokens)]

    @contextlib.asynccontextmanager
    async def relay(self) -> AsyncIterator[tuple[PrefillRelay, types_pb2.Endpoint]]:
        """Yields a relay to the prefill worker, and its endpoint for submits."""
        async with PrefillRelay(self.prefill.listen) as relay:
            yield relay, await self.prefill.endpoint(relay.address)

    def submits(
        self, count: int, num_tokens: int, max_tokens: int = 6, first: int = 0, **fields: object
    ) -> list[worker_pb2.SubmitRequest]:
        """Returns requests with different prompts. Every other one is sampled."""
        return [
            submit(
                first + index,
                self.prompt(num_tokens),
                max_tokens,
                sampling=sampling(temperature=0.8 if index % 2 else 0.0, seed=index),
                **fields,
            )
            for index in range(count)
        ]

    async def undisturbed(self, submits: list[worker_pb2.SubmitRequest]) -> list[list[int]]:
        """Returns the tokens of the same requests on one worker without cached blocks."""
        alone = []
        for one in submits:
            again = worker_pb2.SubmitRequest()
            again.CopyFrom(one)
            again.ClearField("prefill")
            again.cache_namespace = random.randbytes(16)
            alone.append(again)
        tokens: list[list[int]] = []
        async with self.decode.stream() as stream:
            for first in range(0, len(alone), _REFERENCE_BATCH):
                slots = await stream.generate(*alone[first : first + _REFERENCE_BATCH])
                tokens += [slot.tokens for slot in slots]
        return tokens

    async def assert_undisturbed(self, submits: list[worker_pb2.SubmitRequest], slots: list[Slot]) -> None:
        """Asserts that no request failed and that all tokens are those of an undisturbed run."""
        for one, slot in zip(submits, slots, strict=True):
            assert slot.failure is None, f"{one.request_id}: {slot.failure}"
        expected = await self.undisturbed(submits)
        wrong = [
            f"{one.request_id}: {slot.tokens}, expected {tokens}; {slot.finish}"
            for one, slot, tokens in zip(submits, slots, expected, strict=True)
            if slot.tokens != tokens
        ]
        assert not wrong, "\n".join(wrong)

    async def until_idle(self, *workers: WorkerProcess, seconds: float = BACK_SECONDS) -> float:
        """Waits until all blocks of both workers are free. Returns the seconds. Fails after a timeout."""
        began = time.monotonic()
        await asyncio.gather(*(worker.until_idle(seconds) for worker in workers or self.workers))
        return time.monotonic() - began

    async def restart(self, *workers: WorkerProcess) -> None:
        """Restarts workers at the same addresses."""
        for worker in workers:
            worker.spawn()
        await asyncio.gather(*(worker.until_ready() for worker in workers))

    def autopsies(self) -> list[tuple[str, str]]:
        """Returns the autopsy of each worker by name. Restarts both."""
        found = [(worker.name, worker.autopsy()) for worker in self.workers]
        try:
            asyncio.run(self.restart(*self.workers))
        except AssertionError as error:
            found.append(("of the next tests", f"not started: {error}"))
        return found

    async def assert_transfers(self) -> None:
        """Asserts that the pair works: the KV of a new prompt is transferred, and is correct."""
        async with self.relay() as (_, endpoint), self.decode.stream() as stream:
            submits = self.submits(1, 200, prefill=endpoint)
            slots = await stream.generate(*submits)
            await self.assert_undisturbed(submits, slots)
            assert slots[0].finish.num_transferred_tokens == 200


@contextlib.contextmanager
def transfer_rig(
    folder: Path,
    flags: Mapping[str, object] = SIM,
    transports: str = "tcp",
    environs: tuple[Mapping[str, str], Mapping[str, str]] = ({}, {}),
    decode_flags: Mapping[str, object] | None = None,
    vocab_size: int = 4000,
) -> Iterator[TransferRig]:
    """Starts both workers. `environs` are those of the prefill and the decode worker."""
    with ExitStack() as cleanup:
        first, second, transfer = ports.free_ports(3)
        common = {"verify_transfers": True, "transports": transports, "drain_timeout": 0.0, **flags}
        # The proxy uses the transfer listener's port, on the loopback address that the decode worker advertises.
        proxy = ByteProxy(("127.0.0.1", transfer), ("127.0.0.2", transfer))
        cleanup.callback(proxy.close)
        prefill = WorkerProcess(
            "p", f"127.0.0.1:{first}", folder / "prefill.log", {"role": "prefill", **common}, environs[0]
        )
        decode = WorkerProcess(
            "d",
            f"127.0.0.1:{second}",
            folder / "decode.log",
            {
                "role": "decode",
                "transfer_listen": f"127.0.0.1:{transfer}",
                "advertise": "127.0.0.2",
                **common,
                **(decode_flags or {}),
            },
            environs[1],
        )
        for worker in (prefill, decode):
            cleanup.callback(worker.stop)
            worker.spawn()
        for worker in (prefill, decode):
            worker.wait_ready()
        yield TransferRig(prefill, decode, proxy, transports, vocab_size)
