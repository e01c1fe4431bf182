"""Frames are handled in turns: the owner with the least share first, and never a whole backlog at once."""

import asyncio
import random
import time

import pytest
from support.gateway.scripted_services import until

from baton.gateway.generation.workers.frame_order import (
    BATCH_PIECES,
    BATCH_SECONDS,
    BATCH_TOKENS,
    batches,
    merged_pieces,
)
from baton.gateway.generation.workers.stream import WorkerStream
from baton.gateway.metrics.counters import GenerationCounters
from baton.rpc.server.server import RpcServer, Service
from baton.v1 import types_pb2, worker_pb2, worker_pb2_grpc

_NUM_FLOODED = 64
_BACKLOG = 1000  # tokens of each


def naive(slots, counts, token_ids):
    found, begin = {}, 0
    for slot, count in zip(slots, counts or [1] * len(slots), strict=True):
        found[slot] = found.get(slot, []) + list(token_ids[begin : begin + count])
        begin += count
    return found


@pytest.mark.parametrize("ragged", [False, True])
def test_a_slots_steps_are_one_piece_in_their_order(ragged):
    draw = random.Random(5)
    slots = [draw.randrange(9) for _ in range(200)]
    counts = [draw.randrange(4) for _ in slots] if ragged else []
    token_ids = list(range(sum(counts) if ragged else len(slots)))
    pieces = merged_pieces(slots, counts, token_ids, [])
    assert {slot: list(mine) for slot, mine, _ in pieces} == naive(slots, counts, token_ids)
    assert len({slot for slot, _, _ in pieces}) == len(pieces)


def test_the_owner_with_the_least_share_is_first_and_equals_keep_their_order():
    pieces = merged_pieces([3, 1, 3, 2, 3, 1], [], [1, 2, 3, 4, 5, 6], [])
    assert [slot for slot, _, _ in pieces] == [2, 1, 3]
    assert [slot for slot, _, _ in merged_pieces([5, 4, 6], [1, 1, 1], [1, 2, 3], [])] == [5, 4, 6]


def test_logprobs_go_with_their_slot():
    entries = [types_pb2.TokenLogprobs(rank=rank) for rank in range(3)]
    pieces = merged_pieces([1, 2, 1], [], [7, 8, 9], [(1, entries[:1]), (1, entries[1:])])
    assert pieces == [(2, [8], None), (1, [7, 9], entries)]


def test_turns_are_everything_in_order_and_none_is_too_large():
    draw = random.Random(6)
    pieces = [(slot, [1] * draw.randrange(1, 900), None) for slot in range(1000)]
    found = list(batches(pieces))
    assert [piece for batch in found for piece in batch] == pieces
    for batch in found:
        assert 0 < len(batch) <= BATCH_PIECES
        assert sum(len(piece[1]) for piece in batch[:-1]) < BATCH_TOKENS
    assert list(batches([])) == []


class Taker:
    """Records the handled frames of each owner, and the event loop's other work in between."""

    def __init__(self, log, name):
        self.log = log
        self.name = name

    def on_tokens(self, token_ids, logprobs):
        self.log.append((self.name, len(token_ids)))

    def on_finish(self, finish):
        self.log.append((self.name, "finish"))

    def on_failure(self, error):
        self.log.append((self.name, error))


class OneFrame(worker_pb2_grpc.WorkerServiceServicer):
    """Answers the first submits with a frame made by hand."""

    def __init__(self, make_frame):
        self.make_frame = make_frame
        self.num_submits = 0

    async def GenerateStream(self, messages, context):  # noqa: N802
        async for message in messages:
            self.num_submits += len(message.submits)
            if frame := self.make_frame(self.num_submits):
                yield frame


async def handed_over(make_frame, num_slots, taker=Taker, num_finishes=1):
    """What came of one frame over a real stream; "turn" wherever others had the event loop."""
    log = []
    servicer = OneFrame(make_frame)
    register = worker_pb2_grpc.add_WorkerServiceServicer_to_server
    async with RpcServer("127.0.0.1:0", [Service("baton.v1.WorkerService", servicer, register)], 0) as server:
        stream = WorkerStream("w1", f"127.0.0.1:{server.port}", lambda stream: None, GenerationCounters())
        for name in range(num_slots):
            stream.submit(worker_pb2.SubmitRequest(request_id=str(name)), taker(log, name))

        async def others():
            while True:
                if log and log[-1] != "turn":
                    log.append("turn")
                await asyncio.sleep(0)

        running = asyncio.create_task(others())
        await until(lambda: sum(entry[1] == "finish" for entry in log if entry != "turn") == num_finishes)
        running.cancel()
        await stream.close()
    return [entry for entry in log if entry == "turn" or isinstance(entry[1], int)], log


def by_turn(log):
    found = [[]]
    for entry in log:
        if entry == "turn":
            found.append([])
        else:
            found[-1].append(entry)
    return [batch for batch in found if batch]


async def test_a_newcomers_first_token_waits_for_no_backlog():
    """64 requests of 1,000 tokens each are merged before it in the frame: none of them is handed over before it."""
    slots = [*(list(range(_NUM_FLOODED)) * _BACKLOG), _NUM_FLOODED]

    def frame(num_submits):
        if num_submits <= _NUM_FLOODED:
            return None
        made = worker_pb2.GenerateStreamResponse(slots=slots, token_ids=[7] * len(slots))
        made.finishes.add(slot=0, reason=types_pb2.FINISH_REASON_LENGTH)
        return made

    tokens, _ = await handed_over(frame, _NUM_FLOODED + 1)
    assert tokens[0] == (_NUM_FLOODED, 1)
    assert sum(1 for entry in tokens if entry != "turn") == _NUM_FLOODED + 1
    # Whoever arrives meanwhile gets the event loop after at most this many tokens.
    assert all(sum(count for _, count in batch) < BATCH_TOKENS + _BACKLOG for batch in by_turn(tokens))


async def test_a_step_of_many_requests_is_no_single_turn():
    num_slots = 2 * BATCH_PIECES + 1

    def frame(num_submits):
        if num_submits < num_slots:
            return None
        made = worker_pb2.GenerateStreamResponse(slots=range(num_slots), token_ids=[7] * num_slots)
        made.finishes.add(slot=0, reason=types_pb2.FINISH_REASON_LENGTH)
        return made

    tokens, log = await handed_over(frame, num_slots)
    found = by_turn(tokens)
    assert len(found) > 2  # more of them where the machine is busy: a batch also ends by time
    assert max(len(batch) for batch in found) <= BATCH_PIECES
    assert [name for batch in found for name, _ in batch] == list(range(num_slots))
    # A request ends after its last token.
    assert log.index((0, "finish")) > log.index((0, 1))


class SlowTaker(Taker):
    """Takes a turn's time for each token, as parsers do where the machine is busy."""

    def on_tokens(self, token_ids, logprobs):
        time.sleep(BATCH_SECONDS)
        super().on_tokens(token_ids, logprobs)


@pytest.mark.parametrize("num_steps", [1, 2])
async def test_a_turn_ends_where_handing_over_takes_long(num_steps):
    num_slots = 20

    def frame(num_submits):
        if num_submits < num_slots:
            return None
        slots = list(range(num_slots)) * num_steps
        made = worker_pb2.GenerateStreamResponse(slots=slots, token_ids=[7] * len(slots))
        made.finishes.add(slot=0, reason=types_pb2.FINISH_REASON_LENGTH)
        return made

    tokens, _ = await handed_over(frame, num_slots, SlowTaker)
    assert [len(batch) for batch in by_turn(tokens)] == [1] * num_slots


class SlowEnd(Taker):
    """Takes a turn's time for its end."""

    def on_finish(self, finish):
        time.sleep(BATCH_SECONDS)
        super().on_finish(finish)


async def test_requests_that_end_together_do_not_end_in_one_turn():
    num_slots = 20

    def frame(num_submits):
        if num_submits < num_slots:
            return None
        made = worker_pb2.GenerateStreamResponse()
        for slot in range(num_slots):
            made.finishes.add(slot=slot, reason=types_pb2.FINISH_REASON_LENGTH)
        return made

    _, log = await handed_over(frame, num_slots, SlowEnd, num_slots)
    assert by_turn(log) == [[(name, "finish")] for name in range(num_slots)]
