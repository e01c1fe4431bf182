"""The stream to one worker, over real gRPC and by hand-made frames."""

import asyncio
import time

import pytest
from support.gateway.scripted_services import ScriptedWorker, until

from baton.gateway.generation.retry_budget import Loss, loss_of
from baton.gateway.generation.workers.stream import _WINDOW_BYTES, WorkerStream
from baton.gateway.generation.workers.stream_pool import WorkerStreams
from baton.gateway.metrics.counters import GenerationCounters
from baton.rpc.channel import open_channel
from baton.rpc.errors import InternalError, NoCapacity, ServiceError, Unavailable
from baton.v1 import types_pb2, worker_pb2, worker_pb2_grpc


class Receiver:
    def __init__(self):
        self.token_ids = []
        self.logprobs = []
        self.finish = None
        self.error: ServiceError | None = None
        self.ended = asyncio.Event()

    def on_tokens(self, token_ids, logprobs):
        assert not self.ended.is_set()
        self.token_ids.extend(token_ids)
        self.logprobs.extend(logprobs or [])

    def on_finish(self, finish):
        self.finish = finish
        self.ended.set()

    def on_failure(self, error):
        self.error = error
        self.ended.set()


def submit(num_tokens=8, **fields):
    return worker_pb2.SubmitRequest(
        request_id="r", prompt_token_ids=[1, 2, 3], stop=types_pb2.StopConditions(max_tokens=num_tokens), **fields
    )


def counting(request):
    return list(range(100, 100 + request.stop.max_tokens))


@pytest.fixture
async def worker():
    async with ScriptedWorker("w1", counting) as worker:
        yield worker


@pytest.fixture
async def streams():
    async with WorkerStreams(GenerationCounters()) as streams:
        yield streams


async def finish_of(*receivers):
    async with asyncio.timeout(15):
        for receiver in receivers:
            await receiver.ended.wait()


async def test_short_prompts_do_not_wait_for_long_ones(worker, streams, monkeypatch):
    sent = []
    take = WorkerStream._take_message

    def take_message(stream):
        message = take(stream)
        sent.append([len(one.prompt_token_ids) for one in message.submits])
        return message

    monkeypatch.setattr(WorkerStream, "_take_message", take_message)
    receivers = [Receiver() for _ in range(5)]
    for size, receiver in zip((20_000, 3, 30_000, 5, 20_000), receivers, strict=True):
        request = submit()
        request.prompt_token_ids[:] = [7] * size
        streams.get(worker.endpoint).submit(request, receiver)
    await finish_of(*receivers)
    assert sent == [[3, 5, 20_000], [20_000], [30_000]]


async def test_long_constraints_are_not_written_in_one_message(worker, streams, monkeypatch):
    sizes = []
    take = WorkerStream._take_message

    def take_message(stream):
        message = take(stream)
        sizes.append(message.ByteSize())
        return message

    monkeypatch.setattr(WorkerStream, "_take_message", take_message)
    receivers = [Receiver() for _ in range(100)]
    constraint = types_pb2.Constraint(regex="[a-z]{1,4}" * 1600)
    for receiver in receivers:
        streams.get(worker.endpoint).submit(submit(1, constraint=constraint), receiver)
    await finish_of(*receivers)
    assert sum(sizes) > 100 * constraint.ByteSize()
    assert max(sizes) < 300_000


async def test_many_requests_share_one_stream(worker, streams):
    receivers = [Receiver() for _ in range(20)]
    for at, receiver in enumerate(receivers):
        streams.get(worker.endpoint).submit(submit(at + 1), receiver)
    await finish_of(*receivers)
    assert [receiver.token_ids for receiver in receivers] == [list(range(100, 101 + at)) for at in range(20)]
    assert worker.num_streams == 1
    assert len({request.slot for request in worker.submits}) == 20


async def test_slots_are_used_again_after_their_finish(worker, streams):
    for _ in range(3):
        receiver = Receiver()
        streams.get(worker.endpoint).submit(submit(), receiver)
        await finish_of(receiver)
    assert {request.slot for request in worker.submits} == {0}


async def test_an_aborted_slot_is_free_only_after_the_workers_answer(worker, streams):
    worker.step_seconds = 0.05
    stream = streams.get(worker.endpoint)
    receiver, other = Receiver(), Receiver()
    slot = stream.submit(submit(1000), receiver)
    await until(lambda: receiver.token_ids)
    stream.abort(slot)
    assert stream.submit(submit(), other) != slot
    await finish_of(receiver, other)
    assert receiver.finish.reason == types_pb2.FINISH_REASON_ABORT
    assert stream.num_active == 0


async def test_an_abort_before_the_submit_went_out_sends_neither(worker, streams):
    stream = streams.get(worker.endpoint)
    receiver, other = Receiver(), Receiver()
    stream.abort(stream.submit(submit(), receiver))
    assert receiver.finish.reason == types_pb2.FINISH_REASON_ABORT
    stream.submit(submit(), other)
    await finish_of(other)
    assert len(worker.submits) == 1
    assert worker.aborts == []


async def test_a_refused_request_fails_with_the_workers_error(worker, streams):
    worker.refusal = NoCapacity("the queue is full", retry_after_ms=70)
    receiver = Receiver()
    streams.get(worker.endpoint).submit(submit(), receiver)
    await finish_of(receiver)
    assert isinstance(receiver.error, NoCapacity)
    assert (receiver.error.message, receiver.error.retry_after_ms) == ("the queue is full", 70)
    assert receiver.error.worker_id == "w1"


async def test_all_requests_fail_retryably_when_the_worker_is_lost(streams):
    receivers = [Receiver() for _ in range(3)]
    async with ScriptedWorker("w1", counting) as worker:
        stream = streams.get(worker.endpoint)
        for receiver in receivers:
            stream.submit(submit(100_000), receiver)
        await until(lambda: receivers[0].token_ids)
        begin = time.monotonic()
    await finish_of(*receivers)
    assert time.monotonic() - begin < 5
    assert all(isinstance(receiver.error, Unavailable) and receiver.error.worker_id == "w1" for receiver in receivers)
    assert stream.ended
    with pytest.raises(Unavailable):
        stream.submit(submit(), Receiver())


async def test_an_unreachable_worker_fails_soon(streams):
    receiver = Receiver()
    endpoint = types_pb2.Endpoint(worker_id="gone", address="127.0.0.1:1")
    streams.get(endpoint).submit(submit(), receiver)
    await finish_of(receiver)
    assert isinstance(receiver.error, Unavailable)
    assert "gone at 127.0.0.1:1" in receiver.error.message


async def test_a_new_stream_replaces_a_lost_one(worker, streams):
    worker.break_after_tokens = 3
    first, second = Receiver(), Receiver()
    streams.get(worker.endpoint).submit(submit(), first)
    await finish_of(first)
    worker.break_after_tokens = None
    streams.get(worker.endpoint).submit(submit(), second)
    await finish_of(second)
    assert "the worker broke" in first.error.message
    assert second.token_ids == list(range(100, 108))
    assert worker.num_streams == 2


async def test_idle_streams_close_and_silent_ones_fail(worker):
    async with WorkerStreams(GenerationCounters(), idle_seconds=0.1, stall_seconds=0.5) as streams:
        receiver = Receiver()
        stream = streams.get(worker.endpoint)
        stream.submit(submit(), receiver)
        await finish_of(receiver)
        await until(lambda: stream.ended)
        worker.silent = True
        stuck = Receiver()
        streams.get(worker.endpoint).submit(submit(), stuck)
        await finish_of(stuck)
        assert isinstance(stuck.error, Unavailable)
        assert "no frame for" in stuck.error.message


async def test_a_long_prompt_keeps_its_stream_as_long_as_steps_end(worker):
    async with WorkerStreams(GenerationCounters(), stall_seconds=0.5) as streams:
        worker.computes_prompts = True
        receiver = Receiver()
        stream = streams.get(worker.endpoint)
        stream.submit(submit(), receiver)
        await asyncio.sleep(2.0)
        assert not stream.ended
        worker.computes_prompts, worker.steps_last = False, True
        await finish_of(receiver)
        assert "no frame for" in receiver.error.message


@pytest.fixture
async def offline():
    """A stream whose worker is not there, for frames made by hand."""
    stream = WorkerStream("w1", "127.0.0.1:1", lambda stream: None, GenerationCounters())
    yield stream
    await stream.close()


async def test_ragged_frames_and_logprobs_reach_their_slots(offline):
    receivers = [Receiver() for _ in range(3)]
    slots = [offline.submit(submit(), receiver) for receiver in receivers]
    frame = worker_pb2.GenerateStreamResponse(slots=slots, token_counts=[2, 1, 3], token_ids=[1, 2, 3, 4, 5, 6])
    frame.logprobs.add(slot=slots[1], tokens=[types_pb2.TokenLogprobs(logprob=-1)])
    frame.finishes.add(slot=slots[2], reason=types_pb2.FINISH_REASON_LENGTH)
    offline.dispatch(frame)
    assert [receiver.token_ids for receiver in receivers] == [[1, 2], [3], [4, 5, 6]]
    assert [len(receiver.logprobs) for receiver in receivers] == [0, 1, 0]
    assert receivers[2].ended.is_set()


async def test_a_frame_of_several_steps_keeps_their_order(offline):
    receivers = [Receiver(), Receiver()]
    slots = [offline.submit(submit(), receiver) for receiver in receivers]
    frame = worker_pb2.GenerateStreamResponse(slots=[*slots, *slots], token_ids=[1, 2, 3, 4])
    for step in range(2):
        frame.logprobs.add(slot=slots[0], tokens=[types_pb2.TokenLogprobs(rank=step + 1)])
    offline.dispatch(frame)
    assert [receiver.token_ids for receiver in receivers] == [[1, 3], [2, 4]]
    assert [entry.rank for entry in receivers[0].logprobs] == [1, 2]


async def test_a_frame_whose_columns_do_not_fit_is_refused(offline):
    offline.submit(submit(), Receiver())
    for columns in ({"token_ids": [1, 2]}, {"token_ids": [1], "token_counts": [2]}):
        with pytest.raises(InternalError, match="do not fit"):
            offline.dispatch(worker_pb2.GenerateStreamResponse(slots=[0], **columns))


async def test_a_request_that_cannot_take_its_token_ends_alone(offline):
    class Broken(Receiver):
        def on_tokens(self, token_ids, logprobs):
            raise ValueError

    broken, good = Broken(), Receiver()
    slots = [offline.submit(submit(), broken), offline.submit(submit(), good)]
    frame = worker_pb2.GenerateStreamResponse(slots=slots, token_ids=[7, 8])
    offline.dispatch(frame)
    offline.dispatch(frame)
    assert isinstance(broken.error, InternalError)
    assert good.token_ids == [8, 8]


async def test_tokens_of_unknown_slots_are_ignored(offline):
    frame = worker_pb2.GenerateStreamResponse(slots=[9], token_ids=[1])
    frame.finishes.add(slot=9)
    offline.dispatch(frame)


async def test_a_worker_is_held_back_while_its_frames_are_not_read():
    """Frames that wait at the worker are merged; frames in transit delay new requests."""
    async with ScriptedWorker("w1", lambda request: [7] * 2000, step_seconds=0) as worker:
        sizes = []
        advance = worker._advance

        def note(active, frame):
            advance(active, frame)
            sizes.append(frame.ByteSize())

        worker._advance = note
        channel = open_channel(worker.endpoint.address, _WINDOW_BYTES)
        call = worker_pb2_grpc.WorkerServiceStub(channel).GenerateStream()
        await call.write(worker_pb2.GenerateStreamRequest(submits=[submit(2000, slot=at) for at in range(64)]))
        await until(lambda: sizes)
        seen = -1
        while seen < len(sizes):
            seen = len(sizes)
            await asyncio.sleep(0.3)
        assert len(sizes) < 2000
        assert sum(sizes) < 4 * _WINDOW_BYTES
        call.cancel()
        await channel.close()


async def test_several_steps_of_a_slot_are_one_piece(offline):
    pieces = []

    class Noting(Receiver):
        def on_tokens(self, token_ids, logprobs):
            pieces.append(list(token_ids))

    slots = [offline.submit(submit(), Noting()) for _ in range(2)]
    offline.dispatch(worker_pb2.GenerateStreamResponse(slots=[*slots, *slots, slots[0]], token_ids=[1, 2, 3, 4, 5]))
    offline.dispatch(worker_pb2.GenerateStreamResponse(slots=slots, token_counts=[1, 2], token_ids=[6, 7, 8]))
    assert pieces == [[2, 4], [1, 3, 5], [6], [7, 8]]


async def test_merged_reports_of_waits_and_starts_leave_those_waiting_that_have_not_started(worker, streams):
    stream = streams.get(worker.endpoint)
    receivers = [Receiver() for _ in range(3)]
    slots = [stream.submit(submit(), receiver) for receiver in receivers]
    await finish_of(*receivers)
    worker.silent = True
    receivers = [Receiver() for _ in range(3)]
    slots = [stream.submit(submit(), receiver) for receiver in receivers]
    await until(lambda: len(worker.submits) == 6)
    parts = [
        worker_pb2.GenerateStreamResponse(waiting_slots=slots),
        worker_pb2.GenerateStreamResponse(started_slots=slots[:1]),
        worker_pb2.GenerateStreamResponse(started_slots=slots[1:2], slots=slots[:1], token_ids=[100]),
    ]
    merged = b"".join(part.SerializeToString() for part in parts)
    stream.dispatch(worker_pb2.GenerateStreamResponse.FromString(merged))
    stream.fail("the engine ended")
    losses = [loss_of(receiver.error) for receiver in receivers]
    assert losses == [Loss.DIED, Loss.DIED, Loss.GONE]
