"""Prefills for other workers: computes their prompts, and pushes the KV as layers finish.

Runs on the engine thread. A job's blocks are freed when its lease has ended; without a lease, when the job ends.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence

from baton.rpc.errors import DeadlineExceeded, InvalidRequest, Mismatch, ServiceError, Unavailable
from baton.v1 import kv_pb2, worker_pb2
from baton.worker.core import Request
from baton.worker.engine.adapters.directory import AdapterDirectory
from baton.worker.engine.engine import Engine
from baton.worker.engine.submit import prefill_of
from baton.worker.executors.base import Executor
from baton.worker.handover.counters import HandoverCounters
from baton.worker.handover.listener import HandoverListener
from baton.worker.handover.messages import failed_message, first_token_message, public_id, read_message
from baton.worker.handover.prefill.computing_rows import ComputingRows
from baton.worker.handover.prefill.job import DecodePeer, PrefillJob, record_of
from baton.worker.handover.prefill.messages import Message, PushMessages
from baton.worker.handover.prefill.push_progress import PushProgress, SourceGroup
from baton.worker.handover.prefill.push_targets import PushTargets
from baton.worker.handover.settings import HandoverSettings
from baton.worker.kv_spec import KvKind, KvSpec
from baton.worker.link.prompts import KnownPrompt
from baton.worker.requests.outputs import FirstToken, PrefillStarted, StepOutputs
from baton.worker.requests.state import GroupSpan
from baton.worker.transfer.base import Pushed, PushFailed, PushFenced, Transport
from baton.worker.transfer.conversion.blocks import worker_conversion
from baton.worker.transfer.layout import spec_of
from baton.worker.transfer.lease import Action, Actions, SenderLease, State

_log = logging.getLogger(__name__)


class PrefillSide:
    """All prefills for other workers. `send` queues a message on a stream, `flush` sends all queued messages."""

    def __init__(
        self,
        engine: Engine,
        executor: Executor,
        transport: Transport,
        hello: kv_pb2.PeerHello,
        settings: HandoverSettings,
        counters: HandoverCounters,
        send: Callable[[int, Message], None],
        flush: Callable[[], None],
        close_peer: Callable[[int, ServiceError], None],
        listener: HandoverListener,
        clock: Callable[[], float] = time.monotonic,
        adapters: AdapterDirectory | None = None,
    ) -> None:
        self.draining = False
        self._adapters = adapters
        self._engine = engine
        self._executor = executor
        self._transport = transport
        self._hello = hello
        self._settings = settings
        self._counters = counters
        self._send = send
        self._messages = PushMessages(send)
        self._flush = flush
        self._close_peer = close_peer
        self._listener = listener
        self._clock = clock
        self._serial = itertools.count(1)
        self._peers: dict[int, DecodePeer] = {}
        self._jobs: dict[Request, PrefillJob] = {}
        self._pushes: dict[int, PrefillJob] = {}
        self._computing = ComputingRows()
        self._targets = PushTargets(transport, hello.epoch, executor.kv_spec, settings.piece_bytes)
        self._lease_seconds = settings.lease_seconds  # the shortest that a peer requested
        self._handlers: dict[str, Callable[[DecodePeer, worker_pb2.PrefillStreamRequest], None]] = {
            "hello": self._on_hello,
            "renewal": lambda peer, message: None,  # every message renews
            "accept": self._on_accept,
            "cancel": self._on_cancel,
            "abort": self._on_abort,
            "aborted": lambda peer, message: None,  # our fence does not depend on the receiver
            "complete": self._on_complete,
        }
        self._effects: dict[Action, Callable[[PrefillJob], None]] = {
            Action.SEND_SENT: self._messages.sent,
            Action.SEND_ABORT: self._messages.abort,
            Action.SEND_ABORTED: lambda job: self._messages.aborted(job.peer, job.transfer_id),
            Action.FENCE: lambda job: transport.fence_outbound(job.push_id),
            Action.FORCE_FENCE: lambda job: transport.cut_outbound(job.push_id),
            Action.FREE: self._free,
        }

    @property
    def num_jobs(self) -> int:
        """Prefills that hold blocks here, or will."""
        return len(self._jobs)

    @property
    def busy_channels(self) -> list[int]:
        """Streams whose peers wait for heartbeats: all, since a submit may be unread while a step computes."""
        return list(self._peers)

    @property
    def beat_seconds(self) -> float:
        """The interval of heartbeats."""
        return min(self._settings.beat_seconds, self._lease_seconds / 4)

    def num_stranded_blocks(self, now: float, seconds: float) -> int:
        """Returns the blocks of leases that were broken more than `seconds` ago and are not free yet."""
        late = [job for job in self._jobs.values() if job.lease is not None and job.lease.is_late(now, seconds)]
        return sum(job.progress.num_blocks for job in late if job.progress is not None)

    # For streams.

    def on_peer_open(self, channel: int) -> None:
        """Handles a new stream of a decode worker."""
        self._executor.watch_layers(self._computing.on_layer)
        self._peers[channel] = DecodePeer(channel, self._clock())
        self._send(channel, Message(hello=self._hello))

    def on_peer_message(self, channel: int, payload: bytes, known: KnownPrompt | None = None) -> None:
        """Handles a PrefillStreamRequest. An invalid message ends its stream only.

        `known`: the prompt of a submit, as read by the front.
        """
        peer = self._peers.get(channel)
        if peer is None:
            return  # the stream was closed
        peer.last_message_at = self._clock()
        try:
            kinds = (*self._handlers, "submit")
            kind, message = read_message(worker_pb2.PrefillStreamRequest, payload, peer.greeted, kinds)
            if kind == "submit":
                self._on_submit(peer, message.submit, known or KnownPrompt())
            else:
                self._handlers[kind](peer, message)
        except ServiceError as error:
            self._drop_peer(peer, error)

    def on_peer_closed(self, channel: int) -> None:
        """Handles the end of a stream: aborts its prefills, fences its leases. Idempotent."""
        peer = self._peers.pop(channel, None)
        if peer is None:
            return
        peer.open = False
        for job in list(peer.jobs.values()):
            if job.lease is None:
                self._end(job)
            else:
                self._apply(job, job.lease.peer_lost(self._clock()))

    def _drop_peer(self, peer: DecodePeer, error: ServiceError) -> None:
        _log.warning("prefill stream of %s ended: %s", peer.worker_id or "a worker", error.message)
        self._close_peer(peer.channel, error)
        self.on_peer_closed(peer.channel)

    # Messages.

    def _on_hello(self, peer: DecodePeer, message: worker_pb2.PrefillStreamRequest) -> None:
        hello = message.hello
        peer.worker_id = hello.worker_id
        try:
            peer.kv_spec = spec_of(hello.layout)
            peer.conversion = worker_conversion(self._executor.kv_spec, peer.kv_spec)
        except Mismatch:
            self._counters.num_mismatches += 1
            raise
        peer.greeted = True

    def _on_submit(self, peer: DecodePeer, submit: worker_pb2.PrefillSubmit, known: KnownPrompt) -> None:
        if submit.prefill_id in peer.jobs:
            raise InvalidRequest(f"prefill_id={submit.prefill_id} is in use on this stream", field="prefill_id")
        try:
            if self.draining:
                raise Unavailable("the prefill worker is draining and accepts no new prompts")
            name = f"{submit.request_id}#p{next(self._serial)}"
            adapter = None if self._adapters is None else self._adapters.ref_of(submit)
            request = prefill_of(submit, self._executor.model, name, self._clock(), known, adapter)
            assert peer.kv_spec is not None, "a submit is accepted only after the hello"
            self._engine.submit(request, peer.kv_spec.block_size)
        except ServiceError as error:
            self._refuse(peer, submit.prefill_id, error)
            return
        job = PrefillJob(peer, submit.prefill_id, request, next(self._serial))
        peer.jobs[job.prefill_id] = self._jobs[request] = job

    def _on_accept(self, peer: DecodePeer, message: worker_pb2.PrefillStreamRequest) -> None:
        transfer = message.accept.transfer
        job = peer.jobs.get(message.accept.prefill_id)
        if job is None or job.lease is not None:
            # The prefill ended before the accept was received: nothing will be written.
            self._messages.aborted(peer, transfer.transfer_id)
            return
        try:
            target = self._targets.open(job, transfer)
        except ServiceError as error:
            self._messages.aborted(peer, transfer.transfer_id)
            self._fail(job, error)
            return
        lease_seconds = transfer.lease_ms / 1000
        self._lease_seconds = min(self._lease_seconds, lease_seconds)
        job.lease = SenderLease(self._clock(), lease_seconds, self._settings.stall_seconds)
        job.transfer_id = transfer.transfer_id
        peer.transfers[job.transfer_id] = self._pushes[job.push_id] = job
        assert job.progress is not None, "a target needs a prompt that is being computed"
        job.progress.start(target)

    def _on_cancel(self, peer: DecodePeer, message: worker_pb2.PrefillStreamRequest) -> None:
        job = peer.jobs.get(message.cancel.prefill_id)
        if job is None:
            return
        if job.lease is None:
            self._end(job)
        else:
            self._apply(job, job.lease.cancel(self._clock(), "the decode worker cancelled the prefill"))

    def _on_abort(self, peer: DecodePeer, message: worker_pb2.PrefillStreamRequest) -> None:
        job = peer.transfers.get(message.abort.transfer_id)
        if job is None or job.lease is None:
            self._messages.aborted(peer, message.abort.transfer_id)
        else:
            self._apply(job, job.lease.peer_aborts(self._clock(), message.abort.reason))

    def _on_complete(self, peer: DecodePeer, message: worker_pb2.PrefillStreamRequest) -> None:
        job = peer.transfers.get(message.complete.transfer_id)
        if job is not None and job.lease is not None:
            self._apply(job, job.lease.completed())

    # For the engine.

    def on_prefill_started(self, started: PrefillStarted) -> None:
        """Reports the start between schedule and launch: the peer reserves blocks while the first chunk is computed."""
        job = self._jobs.get(started.request)
        if job is None:
            return
        spec = self._executor.kv_spec
        job.started_at, job.num_cached_tokens = self._clock(), started.num_cached_tokens
        spans = [GroupSpan(0, started.block_ids), *started.windows]
        job.progress = PushProgress(
            [
                SourceGroup(layers, span.block_ids, span.first, group.kind is KvKind.STATE)
                for layers, span, group in zip(spec.spans, spans, spec.groups, strict=True)
            ],
            spec.block_size,
            len(started.request.token_ids),
            started.num_cached_tokens,
        )
        self._computing.begin(started.row, started.step, job.progress)
        message = worker_pb2.PrefillStarted(prefill_id=job.prefill_id, num_cached_tokens=started.num_cached_tokens)
        self._messages.send(job.peer, Message(started=message))
        self._flush()

    def on_windows_moved(self, request: Request, windows: Sequence[GroupSpan]) -> None:
        """Records blocks that the next chunk of a prompt is written to, in groups after the first."""
        job = self._jobs.get(request)
        if job is not None and job.progress is not None:
            for group, (first, block_ids) in enumerate(windows, 1):
                job.progress.add_blocks(group, first, block_ids)

    def on_step(self, outputs: StepOutputs) -> None:
        """Handles outputs of the engine. Call right after a step at the latest, before other methods."""
        if not self._jobs:
            return
        now = self._clock()
        for request, num_computed_tokens in outputs.prefill_progress:
            job = self._jobs.get(request)
            if job is not None and job.progress is not None:
                job.progress.all_computed(num_computed_tokens)
                if job.lease is not None:
                    job.lease.progressed(now)
        for first in outputs.first_tokens:
            self._on_first_token(first, now)
        for failure in outputs.failures:
            if job := self._jobs.get(failure.request):
                self._fail(job, failure.error)
        for finish in outputs.finishes:
            if job := self._jobs.get(finish.request):
                self._fail(job, Unavailable("the prefill was aborted"))

    def _on_first_token(self, first: FirstToken, now: float) -> None:
        job = self._jobs.get(first.request)
        if job is None:
            return
        job.computed, job.computed_at = True, now
        job.hold_until = now + self._settings.accept_seconds
        self._computing.end(job.progress)
        message = first_token_message(job.prefill_id, first.token_id, first.logprobs)
        self._messages.send(job.peer, Message(first_token=message))
        if job.lease is not None:
            self._report_if_sent(job, job.lease)

    # For the transport, and time.

    def on_pushed(self, event: Pushed) -> None:
        """Handles the transport's report that all pieces are sent."""
        job = self._pushes.get(event.push_id)
        if job is not None and job.lease is not None:
            job.num_pieces, job.num_bytes = event.num_pieces, event.num_bytes
            job.pushed = True
            self._report_if_sent(job, job.lease)

    def _report_if_sent(self, job: PrefillJob, lease: SenderLease) -> None:
        """Reports the push only after the first token: a decode worker with all KV but no token would compute one."""
        if job.pushed and job.computed:
            self._apply(job, lease.pushed(self._clock()))

    def on_push_failed(self, event: PushFailed) -> None:
        """Handles the transport's report that a push has failed."""
        job = self._pushes.get(event.push_id)
        if job is not None and job.lease is not None:
            self._apply(job, job.lease.cancel(self._clock(), f"the push failed: {event.reason}"))

    def on_push_fenced(self, event: PushFenced) -> None:
        """Handles the transport's report that nothing more is read or sent."""
        job = self._pushes.get(event.push_id)
        if job is not None and job.lease is not None:
            self._apply(job, job.lease.fenced())

    def tick(self, now: float, deaf_seconds: float) -> None:
        """Ends overdue prefills. Ignores peer silence during the last `deaf_seconds`, when nothing was read."""
        for peer in self._peers.values():
            peer.last_message_at = min(now, peer.last_message_at + deaf_seconds)
        for job in list(self._jobs.values()):
            if job.lease is not None:
                job.lease.ignore_gap(now, deaf_seconds)
                job.lease.renew(job.peer.last_message_at)
                self._apply(job, job.lease.tick(now))
            elif now >= job.hold_until:
                self._fail(job, DeadlineExceeded("the decode worker reserved no blocks for the prompt in time"))
            elif now >= job.peer.last_message_at + self._settings.silence_seconds:
                self._fail(job, DeadlineExceeded("the decode worker is silent"))

    def adopt(self, spec: KvSpec, error: ServiceError) -> None:
        """Adopts other weights: closes all streams, so that decode workers send a new hello. No prefill runs."""
        self._targets.kv_spec = spec
        for channel in list(self._peers):
            self._close_peer(channel, error)

    def abort_all(self, reason: str) -> None:
        """Fails every running prefill."""
        for job in list(self._jobs.values()):
            self._fail(job, Unavailable(reason))

    # Ends and effects.

    def _refuse(self, peer: DecodePeer, prefill_id: int, error: ServiceError) -> None:
        self._counters.num_failed_prefills += 1
        self._messages.send(peer, Message(failed=failed_message(prefill_id, error)))

    def _fail(self, job: PrefillJob, error: ServiceError) -> None:
        _log.info("prefill failed: %s", error.log_text, extra={"request_id": public_id(job.request)})
        if job.lease is None:
            self._refuse(job.peer, job.prefill_id, error)
            self._end(job)
        elif job.lease.live:
            self._refuse(job.peer, job.prefill_id, error)
            self._apply(job, job.lease.cancel(self._clock(), error.message))

    def _apply(self, job: PrefillJob, actions: Actions) -> None:
        for action in actions:
            self._effects[action](job)

    def _free(self, job: PrefillJob) -> None:
        lease = job.lease
        assert lease is not None
        if lease.state is State.COMPLETE:
            self._counters.num_sent_transfers += 1
            self._counters.num_sent_bytes += job.num_bytes
            record = record_of(job, self._clock())
            self._counters.tail_seconds.observe(record.completed_at - record.computed_at)
            self._listener.on_record(record)
        else:
            self._counters.num_failed_pushes += 1
            self._counters.num_expired_leases += lease.expired
            _log.info("KV push ended: %s", lease.reason, extra={"request_id": public_id(job.request)})
        self._end(job)

    def _end(self, job: PrefillJob) -> None:
        """Frees the job's blocks, in whichever state it is."""
        self._computing.end(job.progress)
        self._transport.forget(job.push_id)
        self._pushes.pop(job.push_id, None)
        del self._jobs[job.request]
        del job.peer.jobs[job.prefill_id]
        job.peer.transfers.pop(job.transfer_id, None)
        if job.computed:
            self._engine.free_prefill(job.request.request_id)
        else:
            self._engine.abort(job.request.request_id)
