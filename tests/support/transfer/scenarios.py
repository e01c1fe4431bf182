"""Faults of the KV hand-over with real workers. After each one, all blocks are free and all tokens are correct."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Callable

from support.processes.worker_harness import Slot, Stream
from support.processes.worker_processes import WorkerProcess
from support.transfer.rig import TransferRig

from baton.v1 import types_pb2, worker_pb2

# States of a lease, each named after the message that is about to be forwarded.
STATES = ("submit", "started", "accept", "moving", "first_token", "sent", "complete", "abort")
VICTIMS = ("prefill", "decode")
SUSPENDED_SECONDS = 5.0

_PROMPT_TOKENS = 400
_NUM_REQUESTS = 3
_SLOW = 4_000.0  # bytes per second, so that a fault can hit a running transfer
_WAIT_SECONDS = 60.0
_STAYS = 10  # one of this many clients does not disconnect


class At:
    """Calls `act` once, when the hand-over reaches a state."""

    def __init__(self, rig: TransferRig, state: str, act: Callable[[], None], passes: bool = False) -> None:
        self.reached = asyncio.Event()
        self.leasing = asyncio.Event()  # in state `abort`: a lease is open and cannot complete
        self._rig = rig
        self._state = state
        self._act = act
        self._passes = passes
        self._watching: asyncio.Task[None] | None = None
        self._moved = rig.proxy.num_bytes
        if state == "moving":
            rig.proxy.bytes_per_second = _SLOW

    def on_message(self, kind: str) -> bool:
        """The relay's hook."""
        if self._state == "moving" and kind == "accept" and self._watching is None:
            self._watching = asyncio.create_task(self._watch())
        if self._state == "abort" and kind == "sent":
            self.leasing.set()
            return False
        if kind != self._state or self.reached.is_set():
            return True
        self._fire()
        return self._passes

    async def provoke(self, stream: Stream, submits: list[worker_pb2.SubmitRequest]) -> None:
        """Submits requests and waits for the state. The state `abort` needs clients that disconnect."""
        await stream.send(*submits)
        async with asyncio.timeout(_WAIT_SECONDS):
            if self._state == "abort":
                await self.leasing.wait()
                await stream.send(aborts=tuple(one.slot for one in submits))
            await self.reached.wait()

    async def _watch(self) -> None:
        while self._rig.proxy.num_bytes == self._moved:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        self._fire()

    def _fire(self) -> None:
        self._act()
        self.reached.set()


class Bystanders:
    """Requests of a worker without a hand-over, which must not be affected."""

    def __init__(self, rig: TransferRig, worker: WorkerProcess, stream: Stream) -> None:
        self._rig = rig
        self._stream = stream
        self._submits = rig.submits(2, 40, 100)

    async def __aenter__(self) -> Bystanders:
        await self._stream.send(*self._submits)
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        if kind is None:
            slots = await self._stream.until_ended(*(one.slot for one in self._submits), seconds=_WAIT_SECONDS)
            await self._rig.assert_undisturbed(self._submits, slots)


async def _ended(stream: Stream, count: int) -> list[Slot]:
    return await stream.until_ended(*range(count), seconds=_WAIT_SECONDS)


async def kill(rig: TransferRig, victim: str, state: str) -> None:
    """Kills either side with SIGKILL when the hand-over reaches a state, and restarts it at the same address."""
    dead, alive = (rig.prefill, rig.decode) if victim == "prefill" else (rig.decode, rig.prefill)
    at = At(rig, state, dead.kill)
    slots: list[Slot] = []
    async with rig.relay() as (relay, endpoint), alive.stream() as other, rig.decode.stream() as stream:
        relay.on_message = at.on_message
        submits = rig.submits(_NUM_REQUESTS, _PROMPT_TOKENS, prefill=endpoint)
        bystanders = rig.submits(2, 40, 100)
        await other.send(*bystanders)
        await at.provoke(stream, submits)
        rig.proxy.heal()
        restarting = asyncio.create_task(rig.restart(dead))
        survivors = await other.until_ended(0, 1, seconds=_WAIT_SECONDS)
        if victim == "prefill":
            slots = await _ended(stream, len(submits))
        await rig.until_idle(alive)
        await restarting
    if victim == "prefill" and state != "abort":
        await rig.assert_undisturbed(submits, slots)
    await rig.assert_undisturbed(bystanders, survivors)
    await rig.assert_transfers()
    await rig.until_idle()


async def suspend(rig: TransferRig, victim: str, state: str) -> None:
    """Stops either side for 5 s. The other one continues within its lease."""
    worker, alive = (rig.prefill, rig.decode) if victim == "prefill" else (rig.decode, rig.prefill)
    at = At(rig, state, lambda: worker.signal(signal.SIGSTOP), passes=True)
    try:
        async with rig.relay() as (relay, endpoint), alive.stream() as other, rig.decode.stream() as stream:
            relay.on_message = at.on_message
            submits = rig.submits(_NUM_REQUESTS, _PROMPT_TOKENS, prefill=endpoint)
            bystanders = rig.submits(2, 40, 100)
            await other.send(*bystanders)
            await at.provoke(stream, submits)
            rig.proxy.heal()
            stopped = time.monotonic()
            survivors = await other.until_ended(0, 1, seconds=_WAIT_SECONDS)
            if victim == "prefill":
                slots = await _ended(stream, len(submits))
            # Silence is noticed within the lease of 1 s; from then on the bound counts.
            await rig.until_idle(alive, seconds=1.0 + 2.0)
            await asyncio.sleep(max(0.0, SUSPENDED_SECONDS - (time.monotonic() - stopped)))
            worker.signal(signal.SIGCONT)
            slots = await _ended(stream, len(submits))
    finally:
        worker.signal(signal.SIGCONT)
    await rig.until_idle()
    await rig.assert_undisturbed(submits, slots)
    await rig.assert_undisturbed(bystanders, survivors)
    await _until_asked_again(rig)


async def cut(rig: TransferRig, what: str, state: str) -> None:
    """Ends the KV connection, the message stream, or both. Requests continue."""

    async with rig.relay() as (relay, endpoint), rig.decode.stream() as stream, rig.prefill.stream() as other:

        def act() -> None:
            if what != "stream":
                rig.proxy.cut()
            if what != "connection":
                relay.cut()

        at = At(rig, state, act, passes=True)
        relay.on_message = at.on_message
        submits = rig.submits(_NUM_REQUESTS, _PROMPT_TOKENS, prefill=endpoint)
        async with Bystanders(rig, rig.prefill, other):
            await at.provoke(stream, submits)
            rig.proxy.heal()
            slots = await _ended(stream, len(submits))
        await rig.until_idle()
    await rig.assert_undisturbed(submits, slots)
    await _until_asked_again(rig)


async def cable_pulled(rig: TransferRig) -> None:
    """Blocks the KV connection without closing it. Messages still pass."""
    async with rig.relay() as (relay, endpoint), rig.decode.stream() as stream:
        at = At(rig, "moving", rig.proxy.stop)
        relay.on_message = at.on_message
        submits = rig.submits(1, _PROMPT_TOKENS, prefill=endpoint)
        await at.provoke(stream, submits)
        await asyncio.sleep(0.2)
        await stream.send(aborts=(0,))
        slots = await _ended(stream, 1)
        if rig.transports == "tcp":  # other transports may have moved the bytes already
            assert slots[0].finish.reason == types_pb2.FINISH_REASON_ABORT
        await rig.until_idle()
    rig.proxy.heal()
    await _until_asked_again(rig)


async def slow_peer(rig: TransferRig) -> None:
    """Slows down a transfer. It completes, and delays no other request."""
    rig.proxy.bytes_per_second = 30_000
    async with rig.relay() as (_, endpoint), rig.decode.stream() as stream, rig.decode.stream() as other:
        submits = rig.submits(1, 1000, prefill=endpoint)
        bystanders = rig.submits(4, 50, 30)
        await stream.send(*submits)
        slots = await other.generate(*bystanders)
        slow = await _ended(stream, 1)
        rig.proxy.heal()
        await rig.until_idle()
    await rig.assert_undisturbed(submits, slow)
    await rig.assert_undisturbed(bystanders, slots)


async def full_pool(rig: TransferRig, num_blocks: int) -> None:
    """Sends more prompts than fit into the receiver. They wait, or are computed there. None is lost."""
    async with rig.relay() as (_, endpoint), rig.decode.stream() as stream:
        count = 3 * num_blocks * 16 // 1000
        submits = rig.submits(count, 700, 40, prefill=endpoint)
        await stream.send(*submits)
        slots = await _ended(stream, count)
        await rig.until_idle()
    await rig.assert_undisturbed(submits, slots)


async def corrupted(rig: TransferRig, num_flips: int) -> None:
    """Corrupts bytes in flight. That is detected, counted, retried or computed locally, and never changes a token."""
    before = (await rig.decode.stats()).counters
    async with rig.relay() as (_, endpoint), rig.decode.stream() as stream, rig.prefill.stream() as other:
        submits = rig.submits(_NUM_REQUESTS, _PROMPT_TOKENS, prefill=endpoint)
        flipped = rig.proxy.num_flipped
        first, stride = (700, 1500) if rig.transports == "tcp" else (40, 90)  # only tcp sends KV on this connection
        rig.proxy.flips += [rig.proxy.num_bytes + first + stride * i for i in range(num_flips)]
        async with Bystanders(rig, rig.prefill, other):
            await stream.send(*submits)
            slots = await _ended(stream, len(submits))
        assert rig.proxy.num_flipped > flipped, "no byte was changed"
        await rig.until_idle()
    rig.proxy.heal()
    await rig.assert_undisturbed(submits, slots)
    after = (await rig.decode.stats()).counters
    failed = after.transfers.num_failed_transfers - before.transfers.num_failed_transfers
    retried = after.transfers.num_retries - before.transfers.num_retries
    assert failed > 0 or rig.transports != "tcp"
    assert failed == retried + after.num_local_fallbacks - before.num_local_fallbacks
    await _until_asked_again(rig)


async def both_restarted(rig: TransferRig) -> None:
    """Kills both during a hand-over, and restarts them at their addresses."""

    def act() -> None:
        rig.prefill.kill()
        rig.decode.kill()

    async with rig.relay() as (relay, endpoint), rig.decode.stream() as stream:
        at = At(rig, "moving", act)
        relay.on_message = at.on_message
        await at.provoke(stream, rig.submits(_NUM_REQUESTS, _PROMPT_TOKENS, prefill=endpoint))
        rig.proxy.heal()
    await rig.restart(*rig.workers)
    await rig.assert_transfers()
    await rig.until_idle()


async def aborts(rig: TransferRig, seconds: float, per_minute: float = 1000.0, seed: int = 1) -> int:
    """Runs clients that disconnect at random moments; every tenth stays to the end. Returns the number that left."""
    rng = random.Random(seed)
    pause = 60 / per_minute * (1 - 1 / _STAYS)
    num_aborted, kept, leaving = 0, {}, set()
    async with rig.relay() as (_, endpoint), rig.decode.stream() as stream:
        reading = asyncio.create_task(_read_on(stream))
        began = time.monotonic()
        slot = 0
        while time.monotonic() - began < seconds:
            (one,) = rig.submits(1, rng.randrange(80, 600), 8, first=slot, prefill=endpoint)
            await stream.send(one)
            if slot % _STAYS == 0:
                kept[slot] = one
            else:
                leaving.add(asyncio.create_task(_leave(stream, slot, rng.uniform(0.0, 0.4))))
                num_aborted += 1
            slot += 1
            await asyncio.sleep(max(0.0, began + slot * pause - time.monotonic()))
        await asyncio.gather(*leaving)
        print(f"{num_aborted} of {slot} clients left within {time.monotonic() - began:.0f} s")
        async with asyncio.timeout(_WAIT_SECONDS):
            while not all(stream.slots[number].ended for number in range(slot)):
                await asyncio.sleep(0.01)
                assert not reading.done(), reading.exception()
        reading.cancel()
        await rig.until_idle()
        await rig.assert_undisturbed(list(kept.values()), [stream.slots[number] for number in kept])
    await _until_asked_again(rig)
    return num_aborted


async def _read_on(stream: Stream) -> None:
    while True:
        await stream.read()


async def _leave(stream: Stream, slot: int, seconds: float) -> None:
    await asyncio.sleep(seconds)
    await stream.send(aborts=(slot,))


async def _until_asked_again(rig: TransferRig, seconds: float = 20.0) -> None:
    """Waits until the pair works again, at the latest after a backoff."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            await rig.assert_transfers()
        except AssertionError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.1)
        else:
            await rig.until_idle()
            return


async def wrong_layout(rig: TransferRig) -> None:
    """Uses a peer with an incompatible KV layout. No KV moves, the peer is not retried, and requests are answered."""
    async with rig.relay() as (_, endpoint), rig.decode.stream() as stream:
        for _ in range(2):
            submits = rig.submits(_NUM_REQUESTS, _PROMPT_TOKENS, prefill=endpoint)
            await rig.assert_undisturbed(submits, await stream.generate(*submits))
        await rig.until_idle()
    counters = (await rig.decode.stats()).counters
    assert counters.transfers.num_mismatches == 1
    assert counters.transfers.num_transfer_bytes == 0
    assert counters.num_local_fallbacks == 2 * _NUM_REQUESTS
