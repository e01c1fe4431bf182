"""What a decode worker does when a prompt's first token and last block are there, and in which order."""

from __future__ import annotations

import time

import pytest
from support.engine.engine_harness import expected_for, make_executor, make_request, prompt_of
from support.processes.worker_harness import submit
from support.transfer.handover_harness import Frame, Node, finished, idle, make_node, run_until

from baton.v1 import worker_pb2
from baton.worker.executors.sim.executor import SimSpeed
from baton.worker.handover.listener import HandoverListener
from baton.worker.handover.records import PushRecord, TransferRecord
from baton.worker.link.frames import Kind
from baton.worker.process.loop import EngineLoop
from baton.worker.process.profiler import StepProfiler


class Records(HandoverListener):
    """Records received messages."""

    def __init__(self) -> None:
        self.received: list[TransferRecord] = []

    def on_record(self, record: TransferRecord | PushRecord) -> None:
        if isinstance(record, TransferRecord):
            self.received.append(record)


def records_of(decode: Node) -> list[TransferRecord]:
    """What is recorded from now on."""
    records = Records()
    decode.handover.listen(records)
    return records.received


class Link:
    """The end of a decode worker's link, for one request. Its peer is turned while it waits.

    A first token comes together with the word that all blocks are sent. `log` has the kinds of frames that left, and
    what else a test adds.
    """

    def __init__(self, decode: Node, prefill: Node) -> None:
        self.log: list[object] = []
        self._decode, self._prefill = decode, prefill
        self._queued: list[tuple[int, bytes]] = []
        self._first: list[Frame] = [(Kind.GENERATE_OPEN, 1, b""), (Kind.GENERATE, 1, request_frame(prefill))]
        self._deadline = time.monotonic() + 20

    def send(self, kind: int, channel: int = 0, payload: bytes = b"") -> None:
        self._queued.append((kind, payload))

    def flush(self) -> None:
        self.log += [Kind(kind) for kind, _ in self._queued]
        ended = [kind for kind, payload in self._queued if has_finish(kind, payload)]
        self.log += ["end" for _ in ended]
        self._queued.clear()

    def wake(self) -> None:
        pass

    def receive(self, timeout: float | None) -> list[Frame]:
        self.flush()
        assert time.monotonic() < self._deadline, self.log
        if self._first:
            frames, self._first = self._first, []
            return frames
        self._prefill.run_once()
        if "end" in self.log and not self._decode.handover.num_open:
            return [(Kind.STOP, 0, b"")]
        frames = list(self._decode.inbox)
        names = [message_of(frame) for frame in frames]
        if "first_token" in names and "sent" in names:
            time.sleep(0.02)  # the last block's event is there too
        elif "first_token" in names:
            del frames[names.index("first_token") :]
        for _ in frames:
            self._decode.inbox.popleft()
        return frames


def request_frame(prefill: Node) -> bytes:
    one = submit(1, prompt_of(50), 5, prefill=prefill.endpoint)
    return worker_pb2.GenerateStreamRequest(submits=[one]).SerializeToString()


def has_finish(kind: int, payload: bytes) -> bool:
    if kind not in (Kind.GENERATE, Kind.GENERATE_PLAIN, Kind.GENERATE_FIRST):
        return False
    return bool(worker_pb2.GenerateStreamResponse.FromString(payload).finishes)


def message_of(frame: Frame) -> str | None:
    kind, _, payload = frame
    return worker_pb2.PrefillStreamResponse.FromString(payload).WhichOneof("message") if kind == Kind.PEER else None


def test_the_first_token_leaves_before_the_next_step_is_launched(pair):
    """Both come at once: the token, and that all blocks are there. To launch a step takes milliseconds on a GPU."""
    prefill, decode = pair
    link = Link(decode, prefill)
    launch = decode.executor.launch

    def noted(plan) -> None:
        link.log.append("launch")
        launch(plan)

    decode.executor.launch = noted
    profiler = StepProfiler("", "sim", lambda: 0)
    EngineLoop(link, decode.engine, decode.executor, decode.handover, worker_pb2.WorkerState(), profiler).run()
    assert decode.handover.counters().num_transfers == 1
    assert link.log.index(Kind.GENERATE_FIRST) < link.log.index("launch")
    assert link.log.count("launch") >= 4
    decode.assert_nothing_held()


def test_a_hand_over_is_recorded_when_the_request_continues(pair):
    prefill, decode = pair
    records = records_of(decode)
    request = make_request(prompt_of(50), 6)
    decode.submit(request, prefill)
    run_until(pair, finished(decode, request))
    (record,) = records
    assert record.num_bytes > 0
    assert record.launched_at is not None
    assert record.started_at <= record.landed_at <= record.launched_at <= time.monotonic()
    assert decode.seen.tokens[request.request_id] == expected_for(request)


def test_a_request_that_waits_for_a_row_is_recorded_once_it_has_one(network):
    prefill = make_node(network, "prefill")
    decode = make_node(network, "decode", make_executor(speed=SimSpeed()), max_num_requests=1)
    records = records_of(decode)
    other = make_request(prompt_of(20, 3), 400)
    decode.engine.submit(other)
    decode.run_once()
    request = make_request(prompt_of(50), 4)
    decode.submit(request, prefill)
    run_until([prefill, decode], lambda: decode.handover.counters().num_transfers == 1)
    for _ in range(3):
        decode.run_once()
    assert not records
    decode.engine.abort(other.request_id)
    run_until([prefill, decode], finished(decode, request))
    (record,) = records
    assert record.launched_at is not None
    assert record.launched_at > record.landed_at


@pytest.mark.parametrize("how", ["its first token is its last", "it is aborted before it has a row"])
def test_a_request_that_does_not_continue_is_recorded_too(pair, how):
    prefill, decode = pair
    records = records_of(decode)
    request = make_request(prompt_of(50), 1 if how.startswith("its") else 8)
    decode.submit(request, prefill)
    if how.startswith("it is"):
        decode.engine.frozen = True  # nothing is launched
        run_until(pair, lambda: decode.handover.counters().num_transfers == 1)
        assert not records
        decode.engine.abort(request.request_id)
        decode.run_once()
        decode.engine.frozen = False
    run_until(pair, lambda: bool(records))
    run_until(pair, idle(*pair))
    (record,) = records
    assert record.launched_at is None
    assert record.num_bytes > 0
    decode.assert_nothing_held()
