"""The queue: order, merging where the reader lags, a bound, an end."""

from __future__ import annotations

import asyncio

import pytest

from baton.rpc.errors import NoCapacity, Unavailable
from baton.v1 import worker_pb2
from baton.worker.front.send_queue import SendQueue


def frame(step: int, *slots: int) -> bytes:
    return worker_pb2.GenerateStreamResponse(
        step=step, slots=slots, token_ids=[100 + s for s in slots]
    ).SerializeToString()


async def test_messages_come_in_order() -> None:
    queue = SendQueue()
    queue.push(b"a")
    queue.push(b"b")
    assert [await queue.take(), await queue.take()] == [b"a", b"b"]


async def test_a_reader_that_waits_is_woken() -> None:
    queue = SendQueue()
    reading = asyncio.create_task(queue.take())
    await asyncio.sleep(0)
    queue.push(b"a")
    assert await reading == b"a"


async def test_plain_frames_that_piled_up_are_one_frame_of_the_same_meaning() -> None:
    queue = SendQueue()
    for step, slots in ((1, (0, 1)), (2, (0, 1)), (3, (1,))):
        queue.push(frame(step, *slots), mergeable=True)
    merged = worker_pb2.GenerateStreamResponse.FromString(await queue.take())
    assert (merged.step, list(merged.slots)) == (3, [0, 1, 0, 1, 1])
    assert list(merged.token_ids) == [100, 101, 100, 101, 101]


async def test_a_frame_that_cannot_be_merged_keeps_its_place() -> None:
    queue = SendQueue()
    for message, mergeable in ((b"a", True), (b"b", True), (b"C", False), (b"d", True)):
        queue.push(message, mergeable)
    assert [await queue.take() for _ in range(3)] == [b"ab", b"C", b"d"]


async def test_messages_that_may_overtake_are_read_first() -> None:
    queue = SendQueue()
    queue.push(b"X")
    queue.push(frame(1, 0, 1), mergeable=True)
    queue.push(frame(2, 7), ahead=True)
    queue.push(frame(3, 8), ahead=True)
    ahead = worker_pb2.GenerateStreamResponse.FromString(await queue.take())
    assert list(ahead.slots) == [7, 8]
    queue.push(frame(4, 9), ahead=True)
    assert worker_pb2.GenerateStreamResponse.FromString(await queue.take()).slots == [9]
    assert await queue.take() == b"X"
    queue.push(frame(5, 10), ahead=True)
    merged = worker_pb2.GenerateStreamResponse.FromString(await queue.take())
    assert list(merged.slots) == [10, 0, 1], "one message where nothing forbids it"


async def test_a_merged_message_is_short_where_much_waits() -> None:
    queue = SendQueue()
    for step in range(3000):
        queue.push(frame(step, *range(16)), mergeable=True)
    assert len(await queue.take()) < 20_000


async def test_a_message_that_may_wait_goes_with_the_next_one() -> None:
    queue = SendQueue()
    reader = asyncio.create_task(queue.take())
    await asyncio.sleep(0)
    queue.push(b"started", mergeable=True, may_wait=True)
    for _ in range(3):
        await asyncio.sleep(0)
    assert not reader.done()
    queue.push(b" tokens", mergeable=True)
    assert await reader == b"started tokens"


async def test_a_message_that_may_wait_comes_before_the_end_of_the_stream() -> None:
    queue = SendQueue()
    reader = asyncio.create_task(queue.take())
    await asyncio.sleep(0)
    queue.push(b"started", mergeable=True, may_wait=True)
    queue.close(NoCapacity("the engine ended"))
    assert await reader == b"started"
    with pytest.raises(NoCapacity):
        await queue.take()


async def test_a_reader_too_far_behind_is_cut_off() -> None:
    queue = SendQueue(max_bytes=10)
    for _ in range(11):
        queue.push(b"x", mergeable=True)
    assert queue.closed
    queue.push(b"y")
    with pytest.raises(NoCapacity, match="10 bytes"):
        await queue.take()


async def test_queued_messages_can_be_taken_after_the_close_before_its_error() -> None:
    queue = SendQueue()
    queue.push(b"a")
    queue.close(Unavailable("gone"))
    queue.close(Unavailable("again"))
    assert await queue.take() == b"a"
    with pytest.raises(Unavailable, match="gone"):
        await queue.take()


async def test_a_clean_close_ends_with_none() -> None:
    queue = SendQueue()
    reading = asyncio.create_task(queue.take())
    await asyncio.sleep(0)
    queue.close()
    assert await reading is None


async def test_taking_frees_capacity() -> None:
    queue = SendQueue(max_bytes=10)
    for _ in range(100):
        queue.push(b"12345")
        await queue.take()
    assert not queue.closed
