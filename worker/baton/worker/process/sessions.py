"""GenerateStream on the engine's side: receives requests of many streams, sends one frame a step and stream."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, cast

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from baton.rpc.errors import InvalidRequest, ServiceError, Unavailable, status_of
from baton.v1 import types_pb2, worker_pb2
from baton.worker.core import ModelSpec, Request, TokenLogprobs
from baton.worker.engine.adapters.directory import AdapterDirectory
from baton.worker.engine.submit import ParameterMemo, generation_of
from baton.worker.link.frames import Kind
from baton.worker.link.prompts import KnownPrompt
from baton.worker.process.session import Session
from baton.worker.process.slot_messages import finish_message, log_finish, logprobs_message
from baton.worker.requests.outputs import Finish, StepOutputs
from baton.worker.scheduling.background import is_background

_log = logging.getLogger(__name__)

# How long the frames of background requests may wait for more. A frame costs each end about 0.2 ms.
_PATIENCE_SECONDS = 0.02

Send = Callable[[int, int, bytes], None]  # kind, channel, payload


class Runner(Protocol):
    """The operations of an engine that sessions use."""

    def submit(self, request: Request) -> None:
        """Accepts a request, or raises a ServiceError."""

    def abort(self, request_id: str) -> None:
        """Ends a request. Idempotent."""

    def is_running(self, request_id: str) -> bool:
        """Returns whether a launched step computes the request."""


class RemotePrefills(Protocol):
    """The operations of the decode side that sessions use."""

    def expect(self, request: Request, prefill: types_pb2.Endpoint) -> None:
        """Registers a submitted request that may be prefilled by the worker at `prefill`."""

    def num_prefill_cached_tokens(self, request: Request) -> int:
        """Returns how many of a finished request's transferred tokens the prefill worker had cached."""


class Sessions:
    """All open streams. Only the engine thread uses it."""

    def __init__(
        self,
        engine: Runner,
        model: ModelSpec,
        worker_id: str,
        send: Send,
        remote: RemotePrefills | None = None,
        clock: Callable[[], float] = time.monotonic,
        counted: bool = False,  # steps return several tokens of a request, so every frame counts them
        adapters: AdapterDirectory | None = None,  # None: no request has one
    ) -> None:
        self._engine = engine
        self._model = model
        self._worker_id = worker_id
        self._send = send
        self._remote = remote
        self._clock = clock
        self._counted = counted
        self._adapters = adapters
        self._serial = itertools.count(1)
        self._parameters = ParameterMemo()
        self._sessions: dict[int, Session] = {}
        self._session_of: dict[Request, Session] = {}
        self._unsent: list[Session] = []  # sessions with a frame
        self._submitted: list[Request] = []  # since the last report of waits
        self._waiting: set[Request] = set()  # reported as waiting
        self._step = 0
        self.draining = False

    @property
    def num_requests(self) -> int:
        """Requests that have neither finished nor failed."""
        return len(self._session_of)

    def open(self, channel: int) -> None:
        self._sessions[channel] = Session(channel)

    def receive(self, channel: int, payload: bytes, prompts: Sequence[KnownPrompt] = ()) -> None:
        """Handles one GenerateStreamRequest. An invalid request fails its slot, never the stream.

        `prompts`: of each submit, as read by the front; empty if it read none.
        """
        session = self._sessions.get(channel)
        if session is None:
            return  # the stream was closed
        try:
            message = worker_pb2.GenerateStreamRequest.FromString(payload)
        except DecodeError:
            self.close(channel)
            error = InvalidRequest("invalid GenerateStreamRequest", worker_id=self._worker_id)
            self._send(Kind.GENERATE_CLOSE, channel, status_of(error).SerializeToString())
            return
        for slot in message.aborts:
            if request := session.requests.get(slot):
                self._engine.abort(request.request_id)
        for submit, known in zip(message.submits, prompts or itertools.repeat(KnownPrompt()), strict=False):
            try:
                self._submit(session, submit, known)
            except ServiceError as error:
                _log.info("request refused: %s", error.log_text, extra={"request_id": submit.request_id})
                self._fail(session, submit.slot, error)

    def close(self, channel: int) -> None:
        """Closes a stream and aborts its requests. Idempotent."""
        session = self._sessions.pop(channel, None)
        if session is None:
            return
        session.frame = session.first = None
        for slot, request in list(session.requests.items()):
            self._forget(session, slot, request)
            self._engine.abort(request.request_id)

    def abort_all(self, reason: str) -> None:
        """Fails every request as retryable."""
        for session in self._sessions.values():
            for slot, request in list(session.requests.items()):
                self._send_held(session, slot)
                self._forget(session, slot, request)
                self._engine.abort(request.request_id)
                self._fail(session, slot, Unavailable(reason, phase=types_pb2.PHASE_DECODE))

    def report_waits(self) -> None:
        """Reports requests submitted since the last call that no step computes yet."""
        submitted, self._submitted = self._submitted, []
        for request in submitted:
            session = self._session_of.get(request)
            if session is not None and not self._engine.is_running(request.request_id):
                self._waiting.add(request)
                slot = session.slots[request]
                self._frame_of(session, slot)
                session.waits[slot] = None

    def report_starts(self, requests: Sequence[Request]) -> bool:
        """Reports the start of requests that were reported as waiting. Returns whether there are any."""
        started: dict[Session, list[int]] = {}
        for request in requests:
            if request not in self._waiting:
                continue
            self._waiting.remove(request)
            session = self._session_of[request]
            slot = session.slots[request]
            if slot in session.waits:
                del session.waits[slot]  # its wait was not reported
            else:
                started.setdefault(session, []).append(slot)
        for session, slots in started.items():
            frame = worker_pb2.GenerateStreamResponse(started_slots=slots, step=self._step)
            kind = Kind.GENERATE_LATER if session.patient.issuperset(slots) else Kind.GENERATE
            self._send(kind, session.channel, frame.SerializeToString())
        return bool(started)

    def report_peer_loss(self, request: Request, worker_id: str, message: str) -> None:
        """Reports that a request's prefill worker died.

        Uses a separate frame, since the next step may end this process.
        """
        if session := self._session_of.get(request):
            session.fresh.discard(session.slots[request])
            loss = worker_pb2.SlotPeerLoss(slot=session.slots[request], worker_id=worker_id, message=message)
            frame = worker_pb2.GenerateStreamResponse(peer_losses=[loss], step=self._step)
            self._send(Kind.GENERATE, session.channel, frame.SerializeToString())

    def emit(self, outputs: StepOutputs, may_wait: bool = False) -> None:
        """Sends a step's outputs and earlier failures: one frame a stream, and one for first tokens.

        `may_wait`: another call follows by `deadline`, so that frames of background requests may wait for more.
        """
        self._step = max(self._step, outputs.step)
        for request, first, entries in outputs.prompt_logprobs:
            self._add_prompt_logprobs(request, first, entries)
        for request, vectors in outputs.pooled:
            self._add_pooled(request, vectors)
        if outputs.token_ids:
            self._add_tokens(outputs)
        for finish in outputs.finishes:
            self._add_finish(finish)
        for failure in outputs.failures:
            if session := self._session_of.get(failure.request):
                slot = session.slots[failure.request]
                self._send_held(session, slot)
                self._forget(session, slot, failure.request)
                self._fail(session, slot, failure.error)
        now = self._clock()
        unsent, self._unsent = self._unsent, []
        for session in unsent:
            if may_wait and not session.urgent and now < session.due:
                self._unsent.append(session)
            else:
                self._send_frames(session)
                session.urgent, session.due = False, now + _PATIENCE_SECONDS

    @property
    def are_patient(self) -> bool:
        """Whether all requests are background requests whose tokens are sent together."""
        return all(len(session.patient) == len(session.requests) for session in self._sessions.values())

    @property
    def deadline(self) -> float | None:
        """When a frame that waits must be sent, on the clock; None: none waits."""
        return min((session.due for session in self._unsent), default=None)

    def _send_frames(self, session: Session) -> None:
        if frame := session.first:
            session.first = None
            frame.step = self._step
            self._send(Kind.GENERATE_FIRST, session.channel, frame.SerializeToString())
        if frame := session.frame:
            session.frame = None
            frame.step = self._step
            frame.waiting_slots.extend(session.waits)
            session.waits.clear()
            more = frame.logprobs or frame.prompt_logprobs or frame.pooled
            kind = Kind.GENERATE if more else Kind.GENERATE_PLAIN
            self._send(kind, session.channel, frame.SerializeToString())

    def _submit(self, session: Session, submit: worker_pb2.SubmitRequest, known: KnownPrompt) -> None:
        if self.draining:
            raise Unavailable("the worker is draining and accepts no new requests", phase=types_pb2.PHASE_QUEUE)
        if running := session.requests.get(submit.slot):
            # A slot's failure must be its last message, so the slot's first request ends with it.
            self._forget(session, submit.slot, running)
            self._engine.abort(running.request_id)
            raise InvalidRequest(
                f"slot {submit.slot} is in use by request {running.request_id}; both are ended", field="slot"
            )
        adapter = None if self._adapters is None else self._adapters.ref_of(submit)
        name = f"{submit.request_id}#e{next(self._serial)}"  # choices of one request share its id
        request = generation_of(submit, self._model, name, self._clock(), known, self._parameters, adapter)
        self._engine.submit(request)
        if request.remote_prefill and self._remote is not None:
            self._remote.expect(request, submit.prefill)
        session.requests[submit.slot] = request
        session.slots[request] = submit.slot
        if submit.tokens_per_message > 1:
            session.held.expect(submit.slot, submit.tokens_per_message)
        if submit.tokens_per_message > 1 and is_background(request.priority):
            session.patient.add(submit.slot)
        else:
            session.fresh.add(submit.slot)
        self._session_of[request] = session
        self._submitted.append(request)

    def _add_tokens(self, outputs: StepOutputs) -> None:
        if len(self._sessions) == 1:
            (session,) = self._sessions.values()
            slots = list(map(session.slots.get, outputs.requests))
            if None not in slots:
                self._add_columns(session, cast(list[int], slots), outputs.token_ids, outputs.logprobs)
                return
        rows: dict[Session, list[int]] = {}
        for row, request in enumerate(outputs.requests):
            if owner := self._session_of.get(request):
                rows.setdefault(owner, []).append(row)
        for session, indexes in rows.items():
            self._add_columns(
                session,
                [session.slots[outputs.requests[i]] for i in indexes],
                [outputs.token_ids[i] for i in indexes],
                {n: outputs.logprobs[i] for n, i in enumerate(indexes) if i in outputs.logprobs},
            )

    def _add_columns(
        self, session: Session, slots: list[int], token_ids: list[int], logprobs: Mapping[int, TokenLogprobs]
    ) -> None:
        if session.held:
            slots, token_ids, logprobs = session.held.add(slots, token_ids, logprobs)
            if not slots:
                return
        if not session.fresh.isdisjoint(slots):
            slots, token_ids, logprobs = self._without_first(session, slots, token_ids, logprobs)
            if not slots:
                return
        self._add_rows(session, slots, token_ids, logprobs)

    def _add_rows(
        self, session: Session, slots: list[int], token_ids: list[int], logprobs: Mapping[int, TokenLogprobs]
    ) -> None:
        frame = self._frame_of(session, *slots)
        self._write_columns(frame, slots, token_ids)
        records: dict[int, worker_pb2.SlotLogprobs] = {}
        for row in sorted(logprobs):
            slot = slots[row]
            if slot not in records:
                records[slot] = frame.logprobs.add(slot=slot)
            records[slot].tokens.append(logprobs_message(logprobs[row]))

    def _send_held(self, session: Session, slot: int) -> bool:
        """Adds the tokens that wait for more of the slot to the frame. Returns whether there are any."""
        slots, token_ids, logprobs = session.held.take(slot)
        if slots:
            self._add_rows(session, slots, token_ids, logprobs)
        return bool(slots)

    def _write_columns(self, frame: worker_pb2.GenerateStreamResponse, slots: list[int], token_ids: list[int]) -> None:
        """Adds columns. Frames can be concatenated because either all of them count their tokens, or none does."""
        if not self._counted:
            frame.slots.extend(slots)
            frame.token_ids.extend(token_ids)
            return
        tokens_of: dict[int, list[int]] = {}
        for slot, token_id in zip(slots, token_ids, strict=True):
            tokens_of.setdefault(slot, []).append(token_id)
        frame.slots.extend(tokens_of)
        frame.token_counts.extend(map(len, tokens_of.values()))
        frame.token_ids.extend(itertools.chain.from_iterable(tokens_of.values()))

    def _without_first(
        self, session: Session, slots: list[int], token_ids: list[int], logprobs: Mapping[int, TokenLogprobs]
    ) -> tuple[list[int], list[int], Mapping[int, TokenLogprobs]]:
        """Moves plain first tokens to the first frame. Returns the other columns."""
        fresh = session.fresh.intersection(slots)
        session.fresh -= fresh
        first = [row for row, slot in enumerate(slots) if slot in fresh and row not in logprobs]
        if not first:
            return slots, token_ids, logprobs
        if session.first is None:
            self._will_send(session)
            session.first = worker_pb2.GenerateStreamResponse()
        session.urgent = True
        self._write_columns(session.first, [slots[row] for row in first], [token_ids[row] for row in first])
        rest = sorted(set(range(len(slots))).difference(first))
        return (
            [slots[row] for row in rest],
            [token_ids[row] for row in rest],
            {number: logprobs[row] for number, row in enumerate(rest) if row in logprobs},
        )

    def _add_prompt_logprobs(self, request: Request, first: int, entries: list[TokenLogprobs]) -> None:
        session = self._session_of.get(request)
        if session is not None:
            tokens = [logprobs_message(entry) for entry in entries]
            slot = session.slots[request]
            session.fresh.discard(slot)
            self._frame_of(session).prompt_logprobs.add(slot=slot, first_position=first, tokens=tokens)

    def _add_pooled(self, request: Request, vectors: NDArray[np.float32]) -> None:
        session = self._session_of.get(request)
        if session is not None:
            slot = session.slots[request]
            session.fresh.discard(slot)
            values = vectors.astype("<f4", copy=False).tobytes()
            self._frame_of(session).pooled.add(slot=slot, num_vectors=len(vectors), values=values)

    def _add_finish(self, finish: Finish) -> None:
        session = self._session_of.get(finish.request)
        if session is None:
            return
        slot = session.slots[finish.request]
        follows_held = self._send_held(session, slot)
        log_finish(finish)
        frame = session.first
        if frame is None or follows_held or slot not in frame.slots:
            frame = self._frame_of(session, slot)
        num_prefill_cached = self._remote.num_prefill_cached_tokens(finish.request) if self._remote else 0
        frame.finishes.append(finish_message(slot, finish, num_prefill_cached))
        self._forget(session, slot, finish.request)

    def _fail(self, session: Session, slot: int, error: ServiceError) -> None:
        detail = error.detail
        detail.worker_id = detail.worker_id or self._worker_id
        self._frame_of(session).failures.add(slot=slot, code=error.code.value[0], message=error.message, detail=detail)

    def _forget(self, session: Session, slot: int, request: Request) -> None:
        del session.requests[slot], session.slots[request], self._session_of[request]
        self._waiting.discard(request)
        session.fresh.discard(slot)
        session.held.forget(slot)
        session.patient.discard(slot)
        session.waits.pop(slot, None)

    def _frame_of(self, session: Session, *slots: int) -> worker_pb2.GenerateStreamResponse:
        """Returns the frame that is sent next, for content that concerns these slots; none: it is sent at once."""
        session.urgent = session.urgent or not slots or not session.patient.issuperset(slots)
        if session.frame is None:
            self._will_send(session)
            session.frame = worker_pb2.GenerateStreamResponse()
        return session.frame

    def _will_send(self, session: Session) -> None:
        if session.frame is None and session.first is None:
            self._unsent.append(session)
