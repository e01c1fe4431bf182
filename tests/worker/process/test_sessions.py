"""Sessions: the frames of a step, by stream, with a scripted engine."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from support.processes.worker_harness import submit

from baton.rpc.errors import DeadlineExceeded, NoCapacity
from baton.v1 import types_pb2, worker_pb2
from baton.worker.core import FinishReason, ModelSpec, Request, TokenLogprobs
from baton.worker.link.frames import Kind
from baton.worker.link.prompts import KnownPrompt
from baton.worker.process.sessions import Sessions
from baton.worker.requests.outputs import Failure, Finish, StepOutputs


@dataclass
class FakeEngine:
    requests: list[Request] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    full: bool = False
    running: set[str] = field(default_factory=set)

    def submit(self, request: Request) -> None:
        if self.full:
            raise NoCapacity("9 requests wait, the queue takes 9", retry_after_ms=250)
        self.requests.append(request)

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def is_running(self, request_id: str) -> bool:
        return request_id in self.running


@dataclass
class Bench:
    """Sessions over a fake engine, and the frames they sent."""

    engine: FakeEngine = field(default_factory=FakeEngine)
    frames: list[tuple[int, int, bytes]] = field(default_factory=list)
    now: float = 50.0

    def __post_init__(self) -> None:
        self.sessions = self.make_sessions()

    def make_sessions(self, counted: bool = False) -> Sessions:
        model = ModelSpec(bytes(16), 100, 1000, (2,))
        send = lambda *frame: self.frames.append(frame)  # noqa: E731
        return Sessions(self.engine, model, "w1", send, clock=lambda: self.now, counted=counted)

    def submit(self, channel: int, *slots: int, **fields: object) -> list[Request]:
        message = worker_pb2.GenerateStreamRequest(submits=[submit(slot, [5, 6], **fields) for slot in slots])
        self.sessions.receive(channel, message.SerializeToString())
        return self.engine.requests[-len(slots) :]

    def emit(self, may_wait: bool = False, **outputs: object) -> dict[int, worker_pb2.GenerateStreamResponse]:
        """The frames of one step, by channel."""
        self.frames.clear()
        self.sessions.emit(StepOutputs(**outputs), may_wait)
        frames = {channel: worker_pb2.GenerateStreamResponse.FromString(data) for _, channel, data in self.frames}
        assert len(frames) == len(self.frames), "two frames for one stream"
        return frames


@pytest.fixture
def bench() -> Bench:
    bench = Bench()
    bench.sessions.open(1)
    return bench


def test_a_step_of_one_token_each_is_one_plain_frame(bench: Bench) -> None:
    a, b = bench.submit(1, 4, 7)
    frame = bench.emit(step=9, requests=[a, b], token_ids=[11, 12])[1]
    assert (frame.step, list(frame.slots), list(frame.token_ids), list(frame.token_counts)) == (9, [4, 7], [11, 12], [])
    assert bench.frames[0][0] == Kind.GENERATE_FIRST
    assert list(bench.emit(step=10, requests=[a, b], token_ids=[13, 14])[1].token_ids) == [13, 14]
    assert bench.frames[0][0] == Kind.GENERATE_PLAIN


def test_first_tokens_and_their_ends_go_ahead_of_the_others(bench: Bench) -> None:
    (old,) = bench.submit(1, 4)
    bench.emit(step=1, requests=[old], token_ids=[11])
    short, new = bench.submit(1, 5, 6)
    ends = [Finish(short, FinishReason.LENGTH), Finish(old, FinishReason.STOP)]
    bench.sessions.emit(StepOutputs(step=2, requests=[old, short, new], token_ids=[12, 21, 31], finishes=ends))
    assert [kind for kind, _, _ in bench.frames[-2:]] == [Kind.GENERATE_FIRST, Kind.GENERATE_PLAIN]
    first, other = (worker_pb2.GenerateStreamResponse.FromString(data) for _, _, data in bench.frames[-2:])
    assert (list(first.slots), list(first.token_ids), first.step) == ([5, 6], [21, 31], 2)
    assert (list(other.slots), list(other.token_ids), other.step) == ([4], [12], 2)
    assert [end.slot for end in first.finishes] == [5]
    assert [end.slot for end in other.finishes] == [4]


def test_first_tokens_wait_for_frames_that_must_precede_them(bench: Bench) -> None:
    a, b, c = bench.submit(1, 4, 5, 6)
    entry = TokenLogprobs(-0.5, 1, (12,), (-0.5,))
    bench.emit(prompt_logprobs=[(a, 1, [entry])])
    bench.sessions.report_peer_loss(b, "p", "gone")
    bench.emit(requests=[a, b, c], token_ids=[11, 12, 13], logprobs={2: entry})
    ((kind, _, data),) = bench.frames
    assert kind == Kind.GENERATE
    assert list(worker_pb2.GenerateStreamResponse.FromString(data).slots) == [4, 5, 6]


def test_log_probabilities_stay_with_their_tokens_where_others_go_ahead(bench: Bench) -> None:
    (old,) = bench.submit(1, 4)
    bench.emit(requests=[old], token_ids=[11])
    (new,) = bench.submit(1, 5)
    entry = TokenLogprobs(-0.5, 1, (12,), (-0.5,))
    bench.sessions.emit(StepOutputs(requests=[new, old], token_ids=[21, 12], logprobs={1: entry}))
    first, other = (worker_pb2.GenerateStreamResponse.FromString(data) for _, _, data in bench.frames[-2:])
    assert (list(first.slots), list(first.token_ids), len(first.logprobs)) == ([5], [21], 0)
    assert (list(other.slots), [record.slot for record in other.logprobs]) == ([4], [4])


def test_several_tokens_of_a_request_repeat_its_slot(bench: Bench) -> None:
    a, b = bench.submit(1, 4, 7)
    frame = bench.emit(requests=[a, b, a], token_ids=[11, 12, 13])[1]
    assert (list(frame.slots), list(frame.token_counts), list(frame.token_ids)) == ([4, 7, 4], [], [11, 12, 13])
    assert bench.frames[0][0] == Kind.GENERATE_FIRST


def test_tokens_wait_for_as_many_as_the_request_wants_together_and_come_with_its_end(bench: Bench) -> None:
    a, b = *bench.submit(1, 4, tokens_per_message=3), *bench.submit(1, 7)
    bench.emit(requests=[b], token_ids=[20])
    entries = [TokenLogprobs(-0.5 * number, 1, (), ()) for number in range(9)]
    sent = []
    for number in range(1, 7):
        columns = {"requests": [a, b], "token_ids": [10 + number, 20 + number], "logprobs": {0: entries[number]}}
        frame = bench.emit(step=number, **columns, finishes=[Finish(a, FinishReason.STOP)] if number == 6 else [])[1]
        assert len(frame.token_ids) == len(frame.slots)
        mine = [token for slot, token in zip(frame.slots, frame.token_ids, strict=True) if slot == 4]
        sent.append((mine, [one.logprob for record in frame.logprobs for one in record.tokens]))
        assert len(frame.slots) - len(mine) == 1, "the other's come as they are"
        assert [end.slot for end in frame.finishes] == ([4] if number == 6 else [])
    assert sent == [
        ([11], [-0.5]),
        ([], []),
        ([], []),
        ([12, 13, 14], [-1.0, -1.5, -2.0]),
        ([], []),
        ([15, 16], [-2.5, -3.0]),
    ]


@pytest.mark.parametrize("ends", ["a failure", "the worker's end", "an abort"])
def test_held_tokens_are_sent_before_a_request_ends(bench: Bench, ends: str) -> None:
    (a,) = bench.submit(1, 4, tokens_per_message=8)
    bench.emit(requests=[a], token_ids=[11])
    assert not bench.emit(requests=[a], token_ids=[12])
    if ends == "the worker's end":
        bench.sessions.abort_all("it stops")
    failures = [Failure(a, DeadlineExceeded("late"))] if ends == "a failure" else []
    finishes = [Finish(a, FinishReason.ABORT)] if ends == "an abort" else []
    frame = bench.emit(failures=failures, finishes=finishes)[1]
    assert (list(frame.slots), list(frame.token_ids)) == ([4], [12])
    assert [end.slot for end in (*frame.failures, *frame.finishes)] == [4]
    (b,) = bench.submit(1, 4)
    bench.emit(requests=[b], token_ids=[13])
    assert list(bench.emit(requests=[b], token_ids=[14])[1].token_ids) == [14], "the slot's next request holds none"


def test_first_tokens_go_ahead_although_later_ones_wait(bench: Bench) -> None:
    (a,) = bench.submit(1, 4, tokens_per_message=8)
    bench.sessions.emit(StepOutputs(requests=[a, a], token_ids=[11, 12]))
    bench.sessions.emit(StepOutputs(requests=[a], token_ids=[13], finishes=[Finish(a, FinishReason.LENGTH)]))
    assert [kind for kind, _, _ in bench.frames] == [Kind.GENERATE_FIRST, Kind.GENERATE_PLAIN]
    first, rest = (worker_pb2.GenerateStreamResponse.FromString(data) for _, _, data in bench.frames)
    assert (list(first.token_ids), list(rest.token_ids), len(rest.finishes)) == ([11], [12, 13], 1)


def test_frames_that_all_count_their_tokens_are_plain_and_first_tokens_go_ahead(bench: Bench) -> None:
    bench.sessions = bench.make_sessions(counted=True)
    bench.sessions.open(1)
    old, new = bench.submit(1, 4, 5)
    bench.emit(requests=[old], token_ids=[11])
    columns = StepOutputs(requests=[old, old, new, new, new], token_ids=[12, 13, 21, 22, 23])
    bench.sessions.emit(columns)
    assert [kind for kind, _, _ in bench.frames[-2:]] == [Kind.GENERATE_FIRST, Kind.GENERATE_PLAIN]
    first, other = (worker_pb2.GenerateStreamResponse.FromString(data) for _, _, data in bench.frames[-2:])
    assert (list(first.slots), list(first.token_counts), list(first.token_ids)) == ([5], [3], [21, 22, 23])
    assert (list(other.slots), list(other.token_counts), list(other.token_ids)) == ([4], [2], [12, 13])
    bench.emit(requests=[old], token_ids=[14])
    merged = worker_pb2.GenerateStreamResponse.FromString(b"".join(data for _, _, data in bench.frames) * 2)
    assert (list(merged.slots), list(merged.token_counts), list(merged.token_ids)) == ([4, 4], [1, 1], [14, 14])


def test_log_probabilities_are_those_of_each_of_several_tokens(bench: Bench) -> None:
    a, b = bench.submit(1, 4, 7)
    bench.emit(requests=[a, b], token_ids=[9, 9])
    entries = {index: TokenLogprobs(-0.25 * index, 1, (), ()) for index in (1, 2)}
    frame = bench.emit(requests=[a, b, b], token_ids=[11, 12, 13], logprobs=entries)[1]
    assert (list(frame.slots), list(frame.token_counts), list(frame.token_ids)) == ([4, 7, 7], [], [11, 12, 13])
    assert [(record.slot, [one.logprob for one in record.tokens]) for record in frame.logprobs] == [(7, [-0.25, -0.5])]


def test_requests_that_wait_are_reported_once_and_so_is_their_start(bench: Bench) -> None:
    runs, waits, ends = bench.submit(1, 4, 5, 6)
    bench.engine.running = {runs.request_id}
    bench.sessions.report_waits()
    assert list(bench.emit()[1].waiting_slots) == [5, 6]
    assert bench.frames[0][0] == Kind.GENERATE_PLAIN
    bench.sessions.report_waits()
    assert bench.emit() == {}
    bench.emit(finishes=[Finish(ends, FinishReason.ABORT)])
    bench.frames.clear()
    assert bench.sessions.report_starts([runs, waits, ends])
    ((kind, channel, data),) = bench.frames
    assert (kind, channel) == (Kind.GENERATE, 1)
    assert list(worker_pb2.GenerateStreamResponse.FromString(data).started_slots) == [5]
    assert not bench.sessions.report_starts([waits])


def test_each_stream_gets_only_its_own(bench: Bench) -> None:
    bench.sessions.open(2)
    (a,) = bench.submit(1, 0)
    (b,) = bench.submit(2, 0)
    logprobs = TokenLogprobs(-0.5, 1, (12,), (-0.5,))
    frames = bench.emit(requests=[a, b], token_ids=[11, 12], logprobs={1: logprobs})
    assert list(frames[1].token_ids) == [11]
    assert list(frames[2].token_ids) == [12]
    assert not frames[1].logprobs
    assert frames[2].logprobs[0].tokens[0].logprob == pytest.approx(-0.5)


def test_a_step_that_brings_nothing_sends_nothing(bench: Bench) -> None:
    bench.submit(1, 0)
    assert bench.emit(step=1) == {}


def test_a_finish_follows_its_last_token_in_the_same_frame_and_frees_the_slot(bench: Bench) -> None:
    (a,) = bench.submit(1, 3)
    finish = Finish(
        a, FinishReason.STOP, stop_token_id=7, num_cached_tokens=16, num_preemptions=1, queue_seconds=0.5,
        prefill_seconds=0.25,
    )  # fmt: skip
    frame = bench.emit(requests=[a], token_ids=[7], finishes=[finish])[1]
    (record,) = frame.finishes
    assert (record.slot, record.reason, record.stop_token_id) == (3, types_pb2.FINISH_REASON_STOP, 7)
    assert (record.num_cached_tokens, record.num_preemptions) == (16, 1)
    assert (record.queue_us, record.prefill_us) == (500_000, 250_000)
    assert bench.sessions.num_requests == 0
    (again,) = bench.submit(1, 3)
    assert again is not a
    assert bench.emit() == {}


def test_end_of_sequence_has_no_stop_token(bench: Bench) -> None:
    (a,) = bench.submit(1, 3)
    frame = bench.emit(finishes=[Finish(a, FinishReason.STOP)])[1]
    assert not frame.finishes[0].HasField("stop_token_id")


def test_a_failure_carries_its_code_and_the_worker(bench: Bench) -> None:
    (a,) = bench.submit(1, 3)
    frame = bench.emit(failures=[Failure(a, DeadlineExceeded("too late"))])[1]
    (record,) = frame.failures
    assert (record.slot, record.code, record.message, record.detail.worker_id) == (3, 4, "too late", "w1")
    assert bench.sessions.num_requests == 0


def test_a_refused_submit_is_reported_with_the_next_frame(bench: Bench) -> None:
    bench.engine.full = True
    bench.submit(1, 3)
    (record,) = bench.emit()[1].failures
    assert (record.slot, record.code, record.detail.retryable, record.detail.retry_after_ms) == (3, 8, True, 250)


def test_requests_of_one_name_are_different_to_the_engine(bench: Bench) -> None:
    a, b = bench.submit(1, 1, 2, request_id="same")
    assert a.request_id != b.request_id
    assert a.request_id.startswith("same")


def test_an_abort_reaches_the_engine_and_the_slot_waits_for_its_finish(bench: Bench) -> None:
    (a,) = bench.submit(1, 3)
    bench.sessions.receive(1, worker_pb2.GenerateStreamRequest(aborts=[3, 99]).SerializeToString())
    assert bench.engine.aborted == [a.request_id]
    assert bench.sessions.num_requests == 1
    frame = bench.emit(finishes=[Finish(a, FinishReason.ABORT)])[1]
    assert frame.finishes[0].reason == types_pb2.FINISH_REASON_ABORT


def test_a_closed_stream_aborts_all_and_gets_no_more_frames(bench: Bench) -> None:
    a, b = bench.submit(1, 3, 4)
    bench.sessions.close(1)
    bench.sessions.close(1)
    assert bench.engine.aborted == [a.request_id, b.request_id]
    outcome = {"requests": [a], "token_ids": [5], "finishes": [Finish(b, FinishReason.ABORT)]}
    assert bench.emit(**outcome) == {}
    bench.submit(1, 5)  # late message of the closed stream
    assert bench.sessions.num_requests == 0


def test_a_draining_worker_refuses_with_a_retry_elsewhere(bench: Bench) -> None:
    bench.sessions.draining = True
    bench.submit(1, 3)
    (record,) = bench.emit()[1].failures
    assert record.code == 14
    assert record.detail.retryable


def test_aborting_all_fails_every_request_once(bench: Bench) -> None:
    a, _ = bench.submit(1, 3, 4)
    bench.sessions.abort_all("going down")
    frame = bench.emit(finishes=[Finish(a, FinishReason.ABORT)])[1]
    assert sorted(record.slot for record in frame.failures) == [3, 4]
    assert not frame.finishes
    assert len(bench.engine.aborted) == 2


def test_a_request_is_the_submit_resolved(bench: Bench) -> None:
    stop = types_pb2.StopConditions(max_tokens=9, min_tokens=2, stop_token_ids=[8])
    resume = worker_pb2.ResumeState(output_token_ids=[30, 31])
    (request,) = bench.submit(1, 0, stop=stop, resume=resume, timeout_ms=1500, priority=-2)
    assert request.token_ids == [5, 6, 30, 31]
    assert request.num_prompt_tokens == 2
    assert request.stop.eos_token_ids == {2}
    assert request.sampling.suppressed_token_ids == (2, 8)
    assert (request.arrival, request.deadline, request.priority) == (50.0, 51.5, -2)
    assert not request.remote_prefill


def test_a_prompt_that_the_front_took_out_of_the_message_is_put_back(bench: Bench) -> None:
    message = worker_pb2.GenerateStreamRequest(submits=[submit(0, []), submit(1, [7])])
    known = [KnownPrompt(np.array([5, 6], "<u4").tobytes(), b"hashes"), KnownPrompt()]
    bench.sessions.receive(1, message.SerializeToString(), known)
    taken_out, left_in = bench.engine.requests
    assert (taken_out.token_ids, taken_out.num_prompt_tokens, taken_out.block_hashes) == ([5, 6], 2, b"hashes")
    assert (left_in.token_ids, left_in.block_hashes) == ([7], b"")


def test_ignore_eos_leaves_no_end_token(bench: Bench) -> None:
    (request,) = bench.submit(1, 0, stop=types_pb2.StopConditions(max_tokens=9, ignore_eos=True))
    assert request.stop.eos_token_ids == frozenset()


@pytest.mark.parametrize(
    ("part", "field"),
    [("sampling", "allowed_token_ids"), ("stop", "stop_token_ids")],
)
def test_repeated_token_ids_do_not_reach_the_engine(bench: Bench, part: str, field: str) -> None:
    message = submit(3, [5, 6])
    getattr(getattr(message, part), field).extend([7] * 1001)
    bench.sessions.receive(1, worker_pb2.GenerateStreamRequest(submits=[message]).SerializeToString())
    (record,) = bench.emit()[1].failures
    assert (record.code, record.detail.field) == (3, f"{part}.{field}")
    assert not bench.engine.requests


BACKGROUND = {"priority": 1000, "tokens_per_message": 256}


def test_frames_of_background_requests_wait_for_more_and_no_longer_than_until_the_deadline(bench: Bench) -> None:
    a, b = bench.submit(1, 4, 7, **BACKGROUND)
    bench.emit(step=1, requests=[a, b], token_ids=[11, 12], may_wait=True)
    assert bench.sessions.deadline is None
    assert (
        bench.emit(step=2, requests=[a], token_ids=[13], finishes=[Finish(a, FinishReason.LENGTH)], may_wait=True) == {}
    )
    due = bench.sessions.deadline
    assert due is not None
    assert 0 < due - bench.now <= 0.1
    bench.now = due
    frame = bench.emit(step=3, requests=[b], token_ids=[14], finishes=[Finish(b, FinishReason.LENGTH)], may_wait=True)[
        1
    ]
    assert (list(frame.slots), list(frame.token_ids), [one.slot for one in frame.finishes]) == (
        [4, 7],
        [13, 14],
        [4, 7],
    )
    assert bench.sessions.deadline is None


def test_background_frames_leave_with_those_of_others_and_at_the_end_of_the_work(bench: Bench) -> None:
    background, urgent = *bench.submit(1, 4, **BACKGROUND), *bench.submit(1, 5)
    bench.emit(step=1, requests=[background], token_ids=[11], may_wait=True)
    ends = [Finish(background, FinishReason.LENGTH)]
    assert bench.emit(step=2, finishes=ends, may_wait=True) == {}
    assert [one.slot for one in bench.emit(step=3)[1].finishes] == [4]
    (again,) = bench.submit(1, 4, **BACKGROUND)
    assert bench.emit(step=4, requests=[again], token_ids=[12], may_wait=True) == {}
    bench.sessions.emit(StepOutputs(step=5, requests=[urgent], token_ids=[13]), may_wait=True)
    assert [kind for kind, _, _ in bench.frames] == [Kind.GENERATE_FIRST, Kind.GENERATE_PLAIN]
    frames = [worker_pb2.GenerateStreamResponse.FromString(data) for _, _, data in bench.frames]
    assert [(list(frame.slots), list(frame.token_ids)) for frame in frames] == [([5], [13]), ([4], [12])]


def test_the_start_of_a_background_request_waits_for_the_next_message_at_the_front(bench: Bench) -> None:
    for slot, fields, kind in ((4, BACKGROUND, Kind.GENERATE_LATER), (5, {}, Kind.GENERATE)):
        (waits,) = bench.submit(1, slot, **fields)
        bench.sessions.report_waits()
        assert list(bench.emit()[1].waiting_slots) == [slot]
        bench.frames.clear()
        assert bench.sessions.report_starts([waits])
        assert [one[0] for one in bench.frames] == [kind]


def test_all_are_patient_only_while_all_are_background_requests(bench: Bench) -> None:
    assert bench.sessions.are_patient
    bench.submit(1, 4, **BACKGROUND)
    assert bench.sessions.are_patient
    (urgent,) = bench.submit(1, 5)
    assert not bench.sessions.are_patient
    bench.emit(finishes=[Finish(urgent, FinishReason.LENGTH)])
    assert bench.sessions.are_patient


def test_a_failure_of_a_background_request_is_not_delayed(bench: Bench) -> None:
    a, b = bench.submit(1, 4, 7, **BACKGROUND)
    bench.emit(step=1, requests=[a, b], token_ids=[11, 12], may_wait=True)
    failures = [Failure(a, DeadlineExceeded("late"))]
    assert [one.slot for one in bench.emit(step=2, failures=failures, may_wait=True)[1].failures] == [4]


def test_a_start_before_its_wait_was_reported_needs_no_report(bench: Bench) -> None:
    first, waits = bench.submit(1, 4, 7, **BACKGROUND)
    bench.engine.running = {first.request_id}
    bench.emit(step=1, requests=[first], token_ids=[11], may_wait=True)
    bench.sessions.report_waits()
    assert bench.emit(step=2, may_wait=True) == {}
    assert not bench.sessions.report_starts([waits])
    frames = bench.emit(step=3)
    assert all(not frame.waiting_slots and not frame.started_slots for frame in frames.values())
