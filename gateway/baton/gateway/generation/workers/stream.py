"""The stream between this gateway process and one worker: slots, delivery of frames, aborts, loss."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from operator import methodcaller
from typing import Any

import grpc

from baton.gateway.generation.hashed_prompt import HashedPrompt
from baton.gateway.generation.retry_budget import Loss, WorkerLost
from baton.gateway.generation.workers.frame_order import BATCH_SECONDS, Piece, batches, merged_pieces
from baton.gateway.generation.workers.slot_receiver import IgnoredSlot, SlotReceiver
from baton.gateway.metrics.counters import GenerationCounters
from baton.rpc.channel import Dial, OpenChannel
from baton.rpc.errors import InternalError, ServiceError, error_from_detail, problem_of
from baton.v1 import types_pb2, worker_pb2, worker_pb2_grpc

_log = logging.getLogger(__name__)

# Maximum prompt tokens in one message; a burst of long prompts is split.
_MAX_MESSAGE_TOKENS = 32 << 10  # of prompts per message; more are split
_CONSTRAINT_BYTES_PER_TOKEN = 8  # a constraint's text counts as the tokens that take as long to write

# A small flow-control window: while the gateway lags, frames wait at the worker, which merges them, so that a new
# request's first token is among the next.
_WINDOW_BYTES = 8 << 10

# Silent ticks until the worker is pinged, and until it counts as silent; a connection gets more.
_MAX_PING = (1 << 31) - 1
_PING_TICK = 2
_LAST_TICK = 6
_LAST_CONNECTING_TICK = 24

_PLAIN = Dial()

Frame = worker_pb2.GenerateStreamResponse


class WorkerStream:
    """One GenerateStream call. Opens at once; never reopens."""

    def __init__(
        self,
        worker_id: str,
        address: str,
        on_end: Callable[[WorkerStream], None],
        counters: GenerationCounters,
        dial: OpenChannel = _PLAIN,
        on_stall: Callable[[WorkerStream], None] | None = None,
        silence_factor: int = 1,  # multiple of the usual silence limit
    ) -> None:
        self.worker_id = worker_id
        self.address = address
        self.last_used = time.monotonic()  # time of the last submit, frame or engine step
        self._on_end = on_end
        self._on_stall = on_stall
        self._counters = counters
        self._dial = dial
        self._last_tick = _LAST_TICK * silence_factor
        self._receivers: dict[int, SlotReceiver] = {}
        self._free_slots: list[int] = []
        self._num_slots = 0
        self._submits: dict[int, worker_pb2.SubmitRequest] = {}  # by slot, not sent yet
        self._aborts: dict[int, None] = {}  # slots in order
        self._sent: set[int] = set()  # slots whose submits were sent
        self._waiting: set[int] = set()  # slots whose requests the worker has not started
        self._ping = 0  # last ping sent
        self._wants_ping = False
        self._silent_ticks = 0
        self._has_received = False  # whether any frame has arrived
        self._is_silent = False
        self._stalled = False
        self._progress = 0  # engine progress as reported by pongs
        self._was_cut = False
        self._wake = asyncio.Event()
        self._ended = False
        self._task = asyncio.create_task(self._run(), name=f"stream to {worker_id}")

    @property
    def num_active(self) -> int:
        """Returns the number of slots in use."""
        return len(self._receivers)

    @property
    def ended(self) -> bool:
        """Returns whether the stream has ended and takes no more requests."""
        return self._ended

    @property
    def is_silent(self) -> bool:
        """Returns whether the stream ended because the worker was silent."""
        return self._is_silent

    @property
    def has_received(self) -> bool:
        """Returns whether any frame has arrived."""
        return self._has_received

    @property
    def was_never_reached(self) -> bool:
        """Returns whether the stream ended before the worker received anything."""
        return self._ended and not self._has_received and not self._sent

    def tick(self) -> None:
        """Counts one tick of silence (a sixth of the limit). Pending frames were dispatched before.

        Counts ticks rather than seconds, so that a delay of this process is not blamed on workers.
        """
        if not self._receivers:
            self._silent_ticks = 0
            return
        self._silent_ticks += 1
        if self._silent_ticks >= (self._last_tick if self._has_received else _LAST_CONNECTING_TICK):
            self._is_silent = True
            self._counters.silent_workers += 1
            self.fail("the worker is silent")
        elif self._silent_ticks == _PING_TICK:
            self._wants_ping = True
            self._wake.set()

    def submit(
        self, request: worker_pb2.SubmitRequest, receiver: SlotReceiver, prompt: HashedPrompt | None = None
    ) -> int:
        """Queues a request; sets its slot and returns it. Raises WorkerLost once the stream has ended.

        `prompt`: the request's tokens; None: the message has them.
        """
        if self._ended:
            raise self._loss("the stream ended", False)
        if prompt is not None:
            request.prompt_token_ids.extend(prompt.token_ids)
        return self._queue(request, receiver)

    def _queue(self, request: worker_pb2.SubmitRequest, receiver: SlotReceiver) -> int:
        if self._free_slots:
            slot = self._free_slots.pop()
        else:
            slot = self._num_slots
            self._num_slots += 1
        request.slot = slot
        self._receivers[slot] = receiver
        self._submits[slot] = request
        self.last_used = time.monotonic()
        self._wake.set()
        return slot

    def abort(self, slot: int) -> None:
        """Asks the worker to stop a request. The receiver gets on_finish, at once if the request was not sent yet."""
        if self._submits.pop(slot, None) is not None:
            receiver = self._receivers[slot]
            self._free(slot)
            receiver.on_finish(worker_pb2.SlotFinish(slot=slot, reason=types_pb2.FINISH_REASON_ABORT))
        elif slot in self._receivers:
            self._aborts[slot] = None
            self._wake.set()

    def leave(self, slot: int) -> None:
        """Aborts a request without further calls of its receiver."""
        if slot in self._submits:
            del self._submits[slot]
            self._free(slot)
        elif slot in self._receivers:
            self._receivers[slot] = IgnoredSlot()
            self.abort(slot)

    def fail(self, reason: str) -> None:
        """Ends the stream: every request on it fails with a retryable error."""
        self._end(reason)
        self._task.cancel()

    async def close(self) -> None:
        """Ends the stream without failures and waits until its connection is closed."""
        self._end("the gateway closed the stream", lost=False)
        self._task.cancel()
        await asyncio.wait((self._task,))

    def dispatch(self, frame: Frame) -> None:
        """Delivers a frame to its requests."""
        for _ in self._dispatched(frame):
            pass

    def _dispatched(self, frame: Frame) -> Iterator[None]:
        """Delivers a frame in batches; the event loop runs other work in between."""
        self._silent_ticks = 0
        self._has_received = True
        slots, token_ids = frame.slots[:], frame.token_ids[:]
        if slots or not frame.pong or frame.progress > self._progress:  # a pong alone shows life, not progress
            self.last_used = time.monotonic()
        self._progress = max(self._progress, frame.progress)
        counts = frame.token_counts[:]
        if len(counts or slots) != len(slots) or (sum(counts) if counts else len(slots)) != len(token_ids):
            raise InternalError(f"step {frame.step}: {len(slots)} slots do not fit {len(token_ids)} tokens")
        if frame.stalled:
            self._stall()
        elif slots:
            self._stalled = False
        for part in frame.prompt_logprobs:
            self._pass_on(part.slot, methodcaller("on_prompt_logprobs", part.first_position, part.tokens))
        for loss in frame.peer_losses:
            self._pass_on(loss.slot, methodcaller("on_prefill_lost", loss.worker_id, loss.message))
        if frame.waiting_slots or frame.started_slots:
            self._waiting.update(self._receivers.keys() & frame.waiting_slots)
            self._waiting.difference_update(frame.started_slots)
        pieces: Sequence[Piece]
        if counts or frame.logprobs or len(set(slots)) < len(slots):
            # The frame holds several steps because the gateway lags.
            entries = ((entry.slot, entry.tokens) for entry in frame.logprobs)
            pieces = merged_pieces(slots, counts, token_ids, entries)
        else:
            pieces = [(slot, (token_id,), None) for slot, token_id in zip(slots, token_ids, strict=True)]
        for number, batch in enumerate(batches(pieces)):
            if number:
                yield
                self._silent_ticks = 0
            until = time.monotonic() + BATCH_SECONDS
            for slot, own_tokens, logprobs in batch:
                if time.monotonic() >= until:
                    yield
                    self._silent_ticks = 0
                    until = time.monotonic() + BATCH_SECONDS
                self._hand_over(slot, own_tokens, logprobs)
        for pooled in frame.pooled:
            self._pass_on(pooled.slot, methodcaller("on_pooled", pooled))
        until = time.monotonic() + BATCH_SECONDS
        for finish in frame.finishes:
            if time.monotonic() >= until:
                yield
                self._silent_ticks = 0
                until = time.monotonic() + BATCH_SECONDS
            self._finish(finish)
        for failure in frame.failures:
            self._failure(failure)

    def _stall(self) -> None:
        if not self._stalled:
            self._stalled = True
            self._counters.stalled_workers += 1
            _log.warning("the device of worker %s is stalled with %d requests", self.worker_id, len(self._receivers))
        if self._on_stall is not None:
            self._on_stall(self)
        for slot, receiver in list(self._receivers.items()):
            try:
                receiver.on_stall()
            except Exception:
                self._give_up(slot)

    def _pass_on(self, slot: int, event: Callable[[SlotReceiver], None]) -> None:
        """Calls the receiver of a slot, if there is one. A receiver that raises is given up."""
        receiver = self._receivers.get(slot)
        if receiver is not None:
            try:
                event(receiver)
            except Exception:
                self._give_up(slot)

    def _hand_over(
        self, slot: int, token_ids: Sequence[int], logprobs: Sequence[types_pb2.TokenLogprobs] | None
    ) -> None:
        receiver = self._receivers.get(slot)
        if receiver is not None:
            try:
                receiver.on_tokens(token_ids, logprobs)
            except Exception:
                self._give_up(slot)

    def _finish(self, finish: worker_pb2.SlotFinish) -> None:
        receiver = self._free(finish.slot)
        if receiver is None:
            return
        try:
            receiver.on_finish(finish)
        except Exception:
            self._defect(finish.slot, receiver)

    def _failure(self, failure: worker_pb2.SlotFailure) -> None:
        receiver = self._free(failure.slot)
        if receiver is None:
            return
        error = error_from_detail(failure.code, failure.message, failure.detail)
        error.worker_id = error.worker_id or self.worker_id
        self._report_failure(receiver, error)

    def _free(self, slot: int) -> SlotReceiver | None:
        receiver = self._receivers.pop(slot, None)
        self._sent.discard(slot)
        self._waiting.discard(slot)
        if receiver is None:
            self._counters.protocol_errors += 1
            _log.warning("worker %s ended the unused slot %d", self.worker_id, slot)
        else:
            self._free_slots.append(slot)
        return receiver

    def _give_up(self, slot: int) -> None:
        """Fails a request whose receiver raised an exception. The slot is freed after the worker's reply."""
        receiver = self._receivers.get(slot)
        if receiver is not None:
            self._receivers[slot] = IgnoredSlot()
            self.abort(slot)
            self._defect(slot, receiver)

    def _defect(self, slot: int, receiver: SlotReceiver) -> None:
        self._counters.protocol_errors += 1
        _log.exception("failed to handle a token of slot %d of worker %s", slot, self.worker_id)
        self._report_failure(receiver, InternalError("failed to handle the output; see the gateway's log"))

    def _report_failure(self, receiver: SlotReceiver, error: ServiceError) -> None:
        try:
            receiver.on_failure(error)
        except Exception:
            self._counters.protocol_errors += 1
            _log.exception("failed to handle a failure on worker %s", self.worker_id)

    async def _run(self) -> None:
        channel = self._dial(self.address, _WINDOW_BYTES)
        reason = "the worker ended the stream"
        try:
            stub: Any = worker_pb2_grpc.WorkerServiceStub(channel)
            call = stub.GenerateStream()
            writer = asyncio.create_task(self._write(call))
            try:
                async for frame in call:
                    for _ in self._dispatched(frame):
                        await asyncio.sleep(0)
            finally:
                writer.cancel()
                call.cancel()
        except grpc.aio.AioRpcError as error:
            reason = problem_of(error)
            # The worker is alive and closed the stream because this reader was too slow.
            self._was_cut = error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        except asyncio.CancelledError:
            reason = "the stream was closed"
        except Exception as error:
            self._counters.protocol_errors += 1
            _log.exception("the stream to worker %s failed", self.worker_id)
            reason = f"{type(error).__name__}: {error}"
        finally:
            self._end(reason)
            await channel.close()

    async def _write(self, call: Any) -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._submits or self._aborts:
                    message = self._take_message()
                    await call.write(message)
                    self._sent.update(submit.slot for submit in message.submits)
                if self._wants_ping:
                    self._wants_ping = False
                    self._ping = self._ping % _MAX_PING + 1
                    await call.write(worker_pb2.GenerateStreamRequest(ping=self._ping))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            # The call has ended; its reader reports the reason.
            return

    def _take_message(self) -> worker_pb2.GenerateStreamRequest:
        """Takes what fits one message: urgent requests first, then short prompts, which do not wait for long ones."""
        message = worker_pb2.GenerateStreamRequest(aborts=self._aborts)
        self._aborts.clear()
        num_tokens = 0
        for slot in sorted(self._submits, key=self._turn):
            submit = self._submits[slot]
            num_tokens += len(submit.prompt_token_ids)
            if submit.HasField("constraint"):
                num_tokens += submit.constraint.ByteSize() // _CONSTRAINT_BYTES_PER_TOKEN
            if message.submits and num_tokens > _MAX_MESSAGE_TOKENS:
                break
            message.submits.append(self._submits.pop(slot))
        return message

    def _turn(self, slot: int) -> tuple[bool, int]:
        submit = self._submits[slot]
        return submit.priority > 0, len(submit.prompt_token_ids)

    def _end(self, reason: str, lost: bool = True) -> None:
        if self._ended:
            return
        self._ended = True
        receivers, self._receivers = self._receivers, {}
        self._submits.clear()
        self._on_end(self)
        if receivers and lost:
            self._counters.lost_streams += 1
            _log.warning(
                "lost the stream to worker %s at %s with %d requests: %s",
                self.worker_id,
                self.address,
                len(receivers),
                reason,
            )
        for slot, receiver in receivers.items():
            was_computed = slot in self._sent and slot not in self._waiting
            died = was_computed and not (self._is_silent or self._was_cut)
            self._report_failure(receiver, self._loss(reason, died))

    def _loss(self, reason: str, died: bool) -> WorkerLost:
        """Returns the error for a lost request. `died`: the worker ended while it computed the request."""
        error = WorkerLost(
            f"lost the stream to worker {self.worker_id} at {self.address}: {reason}",
            phase=types_pb2.PHASE_DECODE,
            worker_id=self.worker_id,
        )
        error.loss = Loss.DIED if died else Loss.GONE
        return error
