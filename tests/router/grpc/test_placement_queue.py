"""The entries of one PlaceStream, without a network: order, bounds, deadlines, cancels, defects."""

import asyncio

import grpc
import pytest

from baton.router.grpc import placement_queue
from baton.router.grpc.placement_queue import PlacementQueue
from baton.rpc.errors import InvalidRequest, NotFound
from baton.v1 import router_pb2


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Desk:
    """A queue whose placements are counted; each takes `seconds`."""

    def __init__(self, max_waiting=100):
        self.clock, self.seconds, self.placed, self.refused = Clock(), 0.0, [], []
        self.queue = PlacementQueue(self.place, self.refused.append, max_waiting, self.clock)

    def place(self, request):
        self.clock.now += self.seconds
        if request.model == "unknown":
            raise NotFound("no such model", field="model")
        if request.model == "defect":
            raise ZeroDivisionError
        self.placed.append(request.request_id)
        return router_pb2.PlaceResponse(placement_id=int(request.request_id))

    def send(self, *entries):
        self.queue.receive(router_pb2.PlaceStreamRequest(entries=entries))

    async def answers(self):
        async with asyncio.timeout(5):
            return (await self.queue.take()).answers


def entry(call_id, model="m", timeout_ms=0):
    place = router_pb2.PlaceRequest(request_id=str(call_id), model=model)
    return router_pb2.PlaceEntry(call_id=call_id, place=place, timeout_ms=timeout_ms)


def cancel(call_id):
    return router_pb2.PlaceEntry(call_id=call_id, cancel=router_pb2.PlaceCancel())


def codes(answers):
    return {one.call_id: grpc.StatusCode.OK.value[0] if one.HasField("placed") else one.failure.code for one in answers}


async def test_queued_placements_are_answered_in_one_message_in_order():
    desk = Desk()
    desk.send(entry(3), entry(1))
    desk.send(entry(2))
    answers = await desk.answers()
    assert [(one.call_id, one.placed.placement_id) for one in answers] == [(3, 3), (1, 1), (2, 2)]


async def test_a_long_queue_is_answered_in_slices():
    desk = Desk()
    desk.seconds = 0.001
    desk.send(*map(entry, range(1, 6)))
    assert [len(await desk.answers()) for _ in range(3)] == [2, 2, 1]


@pytest.mark.parametrize(
    ("sent", "code", "field"),
    [
        (entry(1, "unknown"), grpc.StatusCode.NOT_FOUND, "model"),
        (entry(1, "defect"), grpc.StatusCode.INTERNAL, ""),
        (router_pb2.PlaceEntry(call_id=1), grpc.StatusCode.INVALID_ARGUMENT, "entries"),
    ],
)
async def test_an_entrys_error_is_its_own(sent, code, field, caplog):
    desk = Desk()
    desk.send(sent, entry(2))
    answers = {one.call_id: one for one in await desk.answers()}
    assert answers[1].failure.code == code.value[0]
    assert answers[1].failure.detail.field == field
    assert answers[2].placed.placement_id == 2
    assert bool([one for one in caplog.records if one.exc_info]) == (code is grpc.StatusCode.INTERNAL)


async def test_more_than_the_bound_is_refused_with_a_retry_time():
    desk = Desk(max_waiting=2)
    desk.send(*map(entry, range(1, 5)))
    answers = await desk.answers()
    assert codes(answers) == {1: 0, 2: 0, 3: 8, 4: 8}
    assert all(one.failure.detail.retry_after_ms for one in answers if one.HasField("failure"))
    assert len(desk.refused) == 2
    desk.send(entry(3))
    assert codes(await desk.answers()) == {3: 0}


async def test_late_or_cancelled_requests_are_not_placed():
    desk = Desk()
    desk.send(entry(1, timeout_ms=100), entry(2, timeout_ms=300), entry(3), entry(4), cancel(3), cancel(77))
    desk.clock.now = 0.2
    assert codes(await desk.answers()) == {1: grpc.StatusCode.DEADLINE_EXCEEDED.value[0], 2: 0, 4: 0}
    assert desk.placed == ["2", "4"]
    assert [one.code for one in desk.refused] == [grpc.StatusCode.DEADLINE_EXCEEDED]


async def test_a_call_id_that_waits_cannot_be_used_again():
    desk = Desk()
    desk.send(entry(1), entry(2), entry(1))
    with pytest.raises(InvalidRequest, match="call_id 1"):
        await desk.answers()
    assert desk.placed == []
    again = Desk()
    again.send(entry(1), cancel(1), entry(1))
    assert codes(await again.answers()) == {1: 0}
    again.send(entry(1))
    assert codes(await again.answers()) == {1: 0}


async def test_the_end_of_the_stream_drops_queued_requests_and_a_close_answers_them():
    ended, closed = Desk(), Desk()
    for desk in (ended, closed):
        desk.send(entry(1))
    ended.queue.end()
    assert await ended.queue.take() is None
    closed.queue.close()
    closed.send(entry(2))
    assert codes(await closed.answers()) == {1: 0}
    assert await closed.queue.take() is None
    assert (ended.placed, closed.placed) == ([], ["1"])


async def test_a_reader_of_nothing_is_read_no_further(monkeypatch):
    monkeypatch.setattr(placement_queue, "_MAX_REFUSED", 3)
    desk = Desk(max_waiting=0)
    num_read = 0

    async def messages():
        nonlocal num_read
        for number in range(1, 11):
            num_read += 1
            yield router_pb2.PlaceStreamRequest(entries=[entry(number)])

    reading = asyncio.create_task(desk.queue.read(messages()))
    for _ in range(20):
        await asyncio.sleep(0)
    assert num_read == 4
    told = [one.call_id for _ in range(3) for one in await desk.answers()]
    await reading
    assert told == list(range(1, 11))
    assert await desk.queue.take() is None
