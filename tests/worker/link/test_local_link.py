"""The link between threads: the same frames in the same order as through a socket pair, bounded, and its ends."""

from __future__ import annotations

import asyncio
import random
import threading
import time

import pytest

from baton.worker.link.frames import Frame, Kind, LinkClosed
from baton.worker.link.local import LocalLink

MIB = 1 << 20


class Front:
    """A link with what its front received."""

    def __init__(self, pace_seconds=0.0):
        self.frames = []
        self.num_ends = 0
        self.link = LocalLink(self.frames.append, self.end, pace_seconds)

    def end(self):
        self.num_ends += 1

    async def until(self, condition):
        async with asyncio.timeout(5):
            while not condition():  # noqa: ASYNC110 - the condition changes in another thread
                await asyncio.sleep(0.001)


@pytest.fixture
async def front():
    side = Front()
    yield side
    side.link.engine.close()
    await side.until(lambda: side.num_ends)
    assert side.num_ends == 1


async def test_frames_pass_in_order_both_ways(front):
    rng = random.Random(3)
    sent = [Frame(rng.randrange(60), rng.randrange(9), rng.randbytes(rng.choice((0, 9, 90_000)))) for _ in range(200)]

    def echo():
        received = 0
        while received < len(sent):
            for frame in front.link.engine.receive(5):
                front.link.engine.send(*frame)
                received += 1
        front.link.engine.flush()

    thread = threading.Thread(target=echo)
    thread.start()
    for frame in sent:
        front.link.front.send(*frame)
        await front.link.front.writable()
    await front.until(lambda: len(front.frames) == len(sent))
    thread.join()
    assert front.frames == sent


async def test_receive_returns_after_its_timeout_and_after_a_wake(front):
    engine = front.link.engine
    began = time.monotonic()
    assert engine.receive(0.05) == []
    assert 0.04 < time.monotonic() - began < 5
    engine.wake()
    assert engine.receive(None) == []


async def test_the_engine_waits_while_the_front_is_megabytes_behind(front):
    engine, done = front.link.engine, threading.Event()

    def send():
        for _ in range(40):
            engine.send(Kind.GENERATE, 0, bytes(MIB))
            engine.flush()
        done.set()

    thread = threading.Thread(target=send)
    thread.start()
    time.sleep(0.05)  # noqa: ASYNC251 - the front reads nothing meanwhile
    assert not done.is_set()
    assert front.link.to_front.num_bytes < 12 * MIB
    await front.until(lambda: len(front.frames) == 40)
    thread.join()


async def test_the_front_waits_while_the_engine_is_megabytes_behind(front):
    for _ in range(12):
        front.link.front.send(Kind.GENERATE, 0, bytes(MIB))
    waiting = asyncio.create_task(front.link.front.writable())
    await asyncio.sleep(0.01)
    assert not waiting.done()
    received = []
    while len(received) < 12:
        received += await asyncio.to_thread(front.link.engine.receive, 5)
    async with asyncio.timeout(5):
        await waiting


async def test_an_event_loop_turn_runs_between_large_frames(front):
    turns = []
    for _ in range(8):
        front.link.engine.send(Kind.GENERATE, 0, bytes(MIB // 2))
    front.link.engine.flush()
    while len(front.frames) < 8:
        turns.append(len(front.frames))
        await asyncio.sleep(0)
    assert len(set(turns)) > 4


async def test_the_engine_receives_what_was_sent_before_the_front_closed(front):
    front.link.front.send(Kind.STOP)
    front.link.front.close()
    assert [frame.kind for frame in front.link.engine.receive(1)] == [Kind.STOP]
    with pytest.raises(LinkClosed):
        front.link.engine.receive(1)
    front.link.engine.post(Kind.LOG, 0, b"lost")
    front.link.engine.send(Kind.LOG, 0, b"lost")
    with pytest.raises(LinkClosed):
        front.link.engine.flush()


async def test_the_front_receives_what_was_sent_before_the_engine_closed(front):
    for number in range(3):
        front.link.engine.send(Kind.GENERATE, number, bytes(MIB))
    front.link.engine.close()
    await front.until(lambda: front.num_ends)
    assert [frame.channel for frame in front.frames] == [0, 1, 2]
    front.link.front.send(Kind.STOP)
    await front.link.front.writable()


async def test_an_engine_outlives_a_closed_event_loop():
    link = await asyncio.to_thread(lambda: asyncio.run(_made()))
    link.engine.send(Kind.GENERATE)
    link.engine.flush()
    with pytest.raises(LinkClosed):
        link.engine.receive(0)


async def _made():
    return LocalLink(lambda frame: None, lambda: None)


async def test_outputs_of_a_busy_engine_are_delivered_together():
    side = Front(pace_seconds=60)
    engine = side.link.engine
    engine.send(Kind.GENERATE_PLAIN, 1, b"a")
    engine.flush()  # the first one of a while is delivered at once
    await side.until(lambda: side.frames)
    for payload in (b"b", b"c"):
        engine.send(Kind.GENERATE_PLAIN, 1, payload)
        assert engine.receive(0) == []  # it has another step to compute
    await asyncio.sleep(0.01)
    assert [frame.payload for frame in side.frames] == [b"a"]
    waiting = threading.Thread(target=engine.receive, args=(5,))
    waiting.start()
    await side.until(lambda: len(side.frames) == 3)
    engine.wake()
    waiting.join()
    engine.send(Kind.GENERATE_PLAIN, 1, b"d")
    engine.send(Kind.REPLY, 2, b"e")
    engine.flush()
    await side.until(lambda: len(side.frames) == 5)
    assert [frame.payload for frame in side.frames] == [b"a", b"b", b"c", b"d", b"e"]
    engine.close()
    await side.until(lambda: side.num_ends)


async def test_large_outputs_of_a_busy_engine_do_not_wait():
    side = Front(pace_seconds=60)
    for _ in range(2):
        side.link.engine.send(Kind.GENERATE_PLAIN, 1, bytes(MIB))
        side.link.engine.flush()
    side.link.engine.send(Kind.GENERATE_PLAIN, 1, b"")
    side.link.engine.flush()
    await side.until(lambda: len(side.frames) == 3)
    side.link.engine.close()
    await side.until(lambda: side.num_ends)
