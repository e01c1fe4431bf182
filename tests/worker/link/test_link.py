"""The link between front and engine: frames survive cuts, bursts, and the other side's end."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
import time

import pytest

from baton.worker.link.frames import EngineLink, Frame, FrameParser, FrontLink, Kind, LinkClosed, encode_frame


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    link = EngineLink(theirs)
    yield ours, link
    link.close()
    ours.close()


def test_frames_survive_any_cut_of_the_byte_stream() -> None:
    rng = random.Random(7)
    frames = [
        Frame(rng.randrange(60), rng.randrange(2**32), rng.randbytes(rng.choice((0, 1, 9, 5000)))) for _ in range(200)
    ]
    data = b"".join(encode_frame(*frame) for frame in frames)
    parser, parsed, start = FrameParser(), [], 0
    while start < len(data):
        end = start + rng.choice((1, 3, 8, 9, 10, 700, 20_000))
        parsed += parser.feed(data[start:end])
        start = end
    assert parsed == frames


def test_receive_returns_after_its_timeout_with_nothing(pair) -> None:
    _, link = pair
    began = time.monotonic()
    assert link.receive(0.05) == []
    assert 0.04 < time.monotonic() - began < 5


def test_frames_of_one_turn_leave_in_one_write(pair) -> None:
    ours, link = pair
    for channel in range(50):
        link.send(Kind.GENERATE, channel, b"x" * 10)
    link.flush()
    assert len(FrameParser().feed(ours.recv(1 << 16))) == 50


def test_a_wake_from_another_thread_ends_the_wait(pair) -> None:
    _, link = pair
    threading.Timer(0.05, link.wake).start()
    began = time.monotonic()
    link.receive(30.0)
    assert time.monotonic() - began < 10


def test_a_frame_posted_by_another_thread_leaves_while_the_engine_computes(pair) -> None:
    ours, link = pair
    link.send(Kind.GENERATE, 1, b"later")
    thread = threading.Thread(target=link.post, args=(Kind.LOG, 3, b"hello"))
    thread.start()
    thread.join()
    assert FrameParser().feed(ours.recv(100)) == [Frame(Kind.LOG, 3, b"hello")]
    link.flush()
    assert FrameParser().feed(ours.recv(100)) == [Frame(Kind.GENERATE, 1, b"later")]


def test_frames_of_many_threads_stay_whole_when_the_front_lags(pair) -> None:
    ours, link = pair
    payload = bytes(50_000)

    def post(channel: int) -> None:
        for _ in range(20):
            link.post(Kind.PEER, channel, payload)

    threads = [threading.Thread(target=post, args=(channel,)) for channel in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        link.send(Kind.GENERATE, 9, payload)
        link.flush()
    parser, frames = FrameParser(), []
    while len(frames) < 100:
        frames += parser.feed(ours.recv(1 << 18))
        link.flush()
    for thread in threads:
        thread.join()
    assert sorted(frame.channel for frame in frames) == [c for c in (0, 1, 2, 3, 9) for _ in range(20)]
    assert all(frame.payload == payload for frame in frames)


def test_a_slow_front_does_not_block_the_engine_below_the_limit(pair) -> None:
    ours, link = pair
    payload = bytes(1 << 20)
    for _ in range(4):
        link.send(Kind.GENERATE, 1, payload)
    link.flush()
    parser, frames = FrameParser(), []
    while len(frames) < 4:
        frames += parser.feed(ours.recv(1 << 18))
        link.flush()
    assert all(frame.payload == payload for frame in frames)


def test_the_end_of_the_front_raises_link_closed(pair) -> None:
    ours, link = pair
    ours.sendall(encode_frame(Kind.STOP, 0, b""))
    ours.close()
    assert link.receive(1.0) == [Frame(Kind.STOP, 0, b"")]
    with pytest.raises(LinkClosed):
        link.receive(1.0)


def test_closing_sends_queued_messages_and_is_idempotent(pair) -> None:
    ours, link = pair
    link.send(Kind.FAILED, 0, b"why")
    link.close()
    link.close()
    link.wake()
    assert FrameParser().feed(ours.recv(100)) == [Frame(Kind.FAILED, 0, b"why")]
    assert ours.recv(100) == b""


async def test_both_ends_talk_and_the_front_sees_the_engine_end() -> None:
    ours, theirs = socket.socketpair()
    got: list[Frame] = []
    closed = asyncio.Event()
    front = await FrontLink.connect(ours, got.append, closed.set)

    def echo() -> None:
        link = EngineLink(theirs)
        received: list[Frame] = []
        while len(received) < 300:
            for frame in link.receive(5.0):
                received.append(frame)
                link.send(frame.kind, frame.channel, frame.payload)
        link.close()

    thread = threading.Thread(target=echo)
    thread.start()
    for channel in range(300):
        front.send(Kind.GENERATE, channel, bytes(channel * 10))
        await front.writable()
    async with asyncio.timeout(5):
        await closed.wait()
    thread.join()
    assert [frame.channel for frame in got] == list(range(300))
    assert all(len(frame.payload) == frame.channel * 10 for frame in got)
    front.send(Kind.STOP)  # dropped, not raised
    await asyncio.sleep(0)


async def test_an_engine_that_does_not_read_makes_the_front_wait() -> None:
    ours, theirs = socket.socketpair()
    front = await FrontLink.connect(ours, lambda frame: None, lambda: None)
    for _ in range(64):
        front.send(Kind.GENERATE, 1, bytes(1 << 16))
    await asyncio.sleep(0)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await front.writable()
    link = EngineLink(theirs)

    def drain() -> None:
        count = 0
        while count < 64:
            count += len(link.receive(1.0))

    await asyncio.gather(asyncio.to_thread(drain), front.writable())
    front.close()
    link.close()
    await asyncio.sleep(0)
