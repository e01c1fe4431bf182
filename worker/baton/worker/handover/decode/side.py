"""Prompts that other workers compute for this one: requests them, reserves blocks, receives the KV, and falls back.

Runs on the engine thread. Every request that is handed over returns to the engine by exactly one of finish_transfer,
prefill_locally and free_lease; with an open lease, by the last two only after the fence.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections.abc import Callable

from baton.rpc.errors import InvalidRequest, Mismatch, ServiceError, Unavailable
from baton.v1 import kv_pb2, types_pb2, worker_pb2
from baton.worker.core import FinishReason, Request
from baton.worker.engine.engine import Engine
from baton.worker.executors.base import Executor
from baton.worker.handover.counters import HandoverCounters
from baton.worker.handover.decode.completed_transfers import CompletedTransfers
from baton.worker.handover.decode.landed_requests import LandedRequests
from baton.worker.handover.decode.messages import PrefillMessages
from baton.worker.handover.decode.prefill_peers import PrefillPeers
from baton.worker.handover.decode.prefill_table import PrefillTable
from baton.worker.handover.decode.remote_prefill import PrefillPeer, RemotePrefill, Stage
from baton.worker.handover.decode.retry import MAX_RETRIES, worth_a_retry
from baton.worker.handover.listener import HandoverListener
from baton.worker.handover.messages import logprobs_of, public_id, read_message
from baton.worker.handover.settings import HandoverSettings
from baton.worker.kv_spec import KvSpec
from baton.worker.requests.outputs import PrefillWanted, StepOutputs
from baton.worker.transfer.base import Inbound, InboundFailed, InboundFenced, Landed, Transport
from baton.worker.transfer.lease import Action, Actions, ReceiverLease, State

_log = logging.getLogger(__name__)


class DecodeSide:
    """All remote prefills of this worker. `open_peer` dials an address, `send` queues a message."""

    def __init__(
        self,
        engine: Engine,
        executor: Executor,
        transport: Transport,
        hello: kv_pb2.PeerHello,
        settings: HandoverSettings,
        counters: HandoverCounters,
        open_peer: Callable[[int, str], None],
        send: Callable[[int, worker_pb2.PrefillStreamRequest], None],
        close_peer: Callable[[int], None],
        listener: HandoverListener,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._executor = executor
        self._transport = transport
        self._hello = hello
        self._settings = settings
        self._counters = counters
        self._clock = clock
        self._listener = listener
        self.landed = LandedRequests(engine, listener)
        self._completed = CompletedTransfers(transport, counters)
        self.peer_totals = self._completed.peer_totals
        self._peers = PrefillPeers(hello, executor.kv_spec, settings, open_peer, send, close_peer, clock)
        self._messages = PrefillMessages(self._peers, transport, hello, settings)
        self._backoff = self._peers.backoff
        self._prefill_ids = itertools.count(1)
        self._transfer_ids = itertools.count(1)
        self._expected: dict[Request, types_pb2.Endpoint] = {}
        self._prefills = PrefillTable()
        self._handlers: dict[str, Callable[[PrefillPeer, worker_pb2.PrefillStreamResponse], None]] = {
            "hello": self._on_hello,
            "renewal": lambda peer, message: None,  # every message renews
            "started": self._on_started,
            "first_token": self._on_first_token,
            "failed": self._on_failed,
            "sent": self._on_sent,
            "abort": self._on_abort,
            "aborted": self._on_aborted,
            "stalled": self._on_stalled,
        }
        self._effects: dict[Action, Callable[[RemotePrefill], None]] = {
            Action.SEND_COMPLETE: self._messages.complete,
            Action.SEND_ABORT: self._messages.abort,
            Action.SEND_ABORTED: lambda prefill: self._messages.aborted(prefill.peer, prefill.transfer_id),
            Action.FENCE: lambda prefill: transport.fence_inbound(prefill.transfer_id),
            Action.FORCE_FENCE: lambda prefill: transport.cut_inbound(prefill.transfer_id),
            Action.COMMIT: self._commit,
            Action.FREE: self._free,
        }

    @property
    def num_remote_prefills(self) -> int:
        """Requests that are being handed over."""
        return len(self._prefills)

    def adopt(self, spec: KvSpec) -> None:
        """Adopts other weights: closes all streams, so that prefill workers receive a new hello. No prefill is open."""
        self._peers.kv_spec = spec
        self._peers.close_all()

    @property
    def num_peers(self) -> int:
        """Open streams, including idle ones."""
        return len(self._peers)

    @property
    def busy_channels(self) -> list[int]:
        """Streams whose peers wait for heartbeats."""
        return [peer.channel for peer in self._peers if peer.prefills]

    def num_stranded_blocks(self, now: float, seconds: float) -> int:
        """Returns the blocks of leases that were broken more than `seconds` ago and are not free yet."""
        return self._prefills.num_late_blocks(now, seconds)

    def expect(self, request: Request, prefill: types_pb2.Endpoint) -> None:
        """Registers a submitted request that may be prefilled by the worker at `prefill`."""
        self._expected[request] = prefill

    # For the engine.

    def on_step(self, outputs: StepOutputs) -> None:
        """Handles outputs of the engine. Call right after a step at the latest, before other methods."""
        for wanted in outputs.prefill_wanted:
            self._begin(wanted)
        for finish in outputs.finishes:
            self._on_request_ended(finish.request, aborted=finish.reason is FinishReason.ABORT)
        for failure in outputs.failures:
            self._on_request_ended(failure.request, aborted=True)
        self._reserve_all()

    def _begin(self, wanted: PrefillWanted) -> None:
        request = wanted.request
        endpoint = self._expected.pop(request, None)
        peer = self._peers.find(endpoint) if endpoint is not None else None
        if peer is None:
            self._engine.prefill_locally(request.request_id)
            return
        self._ask(peer, request, wanted.num_cached_tokens, len(request.token_ids))

    def _ask(self, peer: PrefillPeer, request: Request, num_cached_tokens: int, num_tokens: int) -> RemotePrefill:
        now = self._clock()
        if not peer.prefills:
            peer.last_message_at = max(peer.last_message_at, now)
        prefill = RemotePrefill(
            peer, next(self._prefill_ids), request, num_cached_tokens, num_tokens, now + self._settings.start_seconds
        )
        self._prefills.add(prefill)
        self._messages.submit(prefill, now)
        return prefill

    def _on_request_ended(self, request: Request, aborted: bool) -> None:
        self._expected.pop(request, None)
        self.landed.ended(request)
        prefill = self._prefills.of_request(request)
        if prefill is None:
            return
        if prefill.lease is None or aborted:
            prefill.needed = False
            self._give_up(prefill, "the request ended")
        prefill.ended = True  # its first token was the last: the other blocks are still useful for the cache

    # For streams.

    def on_peer_message(self, channel: int, payload: bytes) -> None:
        """Handles a PrefillStreamResponse."""
        peer = self._peers.at(channel)
        if peer is None:
            return  # the stream was closed
        peer.last_message_at = self._clock()
        try:
            kind, message = read_message(worker_pb2.PrefillStreamResponse, payload, peer.greeted, self._handlers)
            self._handlers[kind](peer, message)
        except ServiceError as error:
            self._drop_peer(peer, error.message)

    def on_peer_closed(self, channel: int, reason: str, died: bool = True) -> None:
        """Handles the end of a stream, or a failed dial. Idempotent. `died`: the peer ended the stream."""
        peer = self._peers.closed(channel)
        if peer is None:
            return
        now = self._clock()
        for prefill in list(peer.prefills.values()):
            if died and prefill.computes_there and not prefill.ended:
                self._listener.on_peer_died(prefill.request, peer.endpoint.worker_id, reason)
            if prefill.lease is None:
                self._give_up(prefill, reason)
            else:
                self._apply(prefill, prefill.lease.peer_lost(now))

    def _drop_peer(self, peer: PrefillPeer, reason: str) -> None:
        _log.warning("prefill worker at %s is dropped: %s", peer.endpoint.address, reason)
        self._peers.close(peer)
        self.on_peer_closed(peer.channel, reason, died=False)

    def _on_hello(self, peer: PrefillPeer, message: worker_pb2.PrefillStreamResponse) -> None:
        try:
            self._peers.greeted(peer, message.hello)
        except Mismatch as error:
            self._counters.num_mismatches += 1
            self._drop_peer(peer, error.message)
            self._peers.mismatched(peer)

    def _on_started(self, peer: PrefillPeer, message: worker_pb2.PrefillStreamResponse) -> None:
        prefill = peer.prefills.get(message.started.prefill_id)
        if prefill is None or prefill.stage is not Stage.QUEUED:
            return
        cached_there = message.started.num_cached_tokens - prefill.num_cached_tokens
        prefill.request.num_prefill_cached_tokens = max(0, cached_there)
        prefill.deadline = self._clock() + self._settings.reserve_seconds
        self._prefills.started(prefill)
        self._reserve_all()

    def _on_first_token(self, peer: PrefillPeer, message: worker_pb2.PrefillStreamResponse) -> None:
        first = message.first_token
        prefill = peer.prefills.get(first.prefill_id)
        if prefill is None or prefill.first_token_at is not None:
            return
        if first.token_id >= self._executor.model.vocab_size:
            raise InvalidRequest(
                f"the first token is {first.token_id}, outside the vocabulary of {self._executor.model.vocab_size}",
                field="token_id",
            )
        prefill.first_token_at = self._clock()
        if prefill.lease is not None:
            prefill.lease.progressed(prefill.first_token_at)
        self._engine.accept_first_token(prefill.request.request_id, first.token_id, logprobs_of(first))
        self._listener.on_first_token()

    def _on_failed(self, peer: PrefillPeer, message: worker_pb2.PrefillStreamResponse) -> None:
        prefill = peer.prefills.get(message.failed.prefill_id)
        if prefill is not None:
            self._counters.num_refused_prefills += 1
            prefill.num_retries = MAX_RETRIES
            self._give_up(prefill, f"the prefill worker refused: {message.failed.message}", notify=False)

    def _on_sent(self, peer: PrefillPeer, message: worker_pb2.PrefillStreamResponse) -> None:
        prefill = self._prefills.of_transfer(message.sent.transfer_id, peer)
        if prefill is not None and prefill.lease is not None:
            sent = message.sent
            self._apply(prefill, prefill.lease.sent(self._clock(), sent.num_pieces, sent.num_bytes))

    def _on_abort(self, peer: PrefillPeer, message: worker_pb2.PrefillStreamResponse) -> None:
        prefill = self._prefills.of_transfer(message.abort.transfer_id, peer)
        if prefill is None or prefill.lease is None:
            self._messages.aborted(peer, message.abort.transfer_id)
        else:
            prefill.broken |= self._transport.num_landed_bytes(prefill.transfer_id) > 0
            self._apply(prefill, prefill.lease.peer_aborts(self._clock(), message.abort.reason))

    def _on_aborted(self, peer: PrefillPeer, message: worker_pb2.PrefillStreamResponse) -> None:
        prefill = self._prefills.of_transfer(message.aborted.transfer_id, peer)
        if prefill is not None and prefill.lease is not None:
            self._apply(prefill, prefill.lease.aborted(self._clock()))

    def _on_stalled(self, peer: PrefillPeer, message: worker_pb2.PrefillStreamResponse) -> None:
        """Falls back from a peer whose device is stuck."""
        self._backoff.failed(peer.endpoint.address, peer.endpoint.epoch, self._clock())
        for prefill in list(peer.prefills.values()):
            prefill.num_retries = MAX_RETRIES
            self._give_up(prefill, "the prefill worker's device is stuck")

    def _reserve_all(self) -> None:
        """Leases blocks for started prompts, in order of their start."""
        while prefill := self._prefills.next_reserving():
            if self._engine.reserve_blocks(prefill.request.request_id) is None:
                return
            self._accept(prefill)

    def _accept(self, prefill: RemotePrefill) -> None:
        settings = self._settings
        prefill.leased_at = self._clock()
        prefill.spans = self._engine.leased_spans(prefill.request.request_id)
        prefill.transfer_id = next(self._transfer_ids)
        prefill.lease = ReceiverLease(
            prefill.leased_at, settings.lease_seconds, settings.stall_seconds, self._transport.fences_locally
        )
        self._prefills.leased(prefill)
        generation = secrets.randbits(64)
        block_ids, *more = (tuple(span.block_ids) for span in prefill.spans)
        inbound = Inbound(prefill.transfer_id, self._hello.epoch, generation, block_ids, settings.verify, tuple(more))
        self._transport.open(inbound)
        self._messages.accept(prefill, generation)

    def on_landed(self, event: Landed) -> None:
        """Handles the transport's report that every block has arrived."""
        prefill = self._prefills.of_transfer(event.transfer_id)
        if prefill is not None and prefill.lease is not None:
            prefill.num_landed_bytes = event.num_bytes
            self._apply(prefill, prefill.lease.landed(self._clock(), event.num_pieces, event.num_bytes))

    def on_inbound_failed(self, event: InboundFailed) -> None:
        """Handles the transport's report of an invalid piece or a lost connection."""
        self._counters.num_checksum_errors += event.corrupt
        prefill = self._prefills.of_transfer(event.transfer_id)
        if prefill is not None and prefill.lease is not None:
            prefill.broken = True
            self._apply(prefill, prefill.lease.cancel(self._clock(), event.reason))

    def on_inbound_fenced(self, event: InboundFenced) -> None:
        """Handles the transport's report that nothing more is written."""
        prefill = self._prefills.of_transfer(event.transfer_id)
        if prefill is not None and prefill.lease is not None:
            self._apply(prefill, prefill.lease.fenced())

    def tick(self, now: float, deaf_seconds: float) -> None:
        """Reserves blocks. Ends overdue prefills and streams of silent peers.

        Ignores peer silence during the last `deaf_seconds`, when nothing was read.
        """
        self._reserve_all()
        for prefill in self._prefills:
            if prefill.lease is not None:
                self._tick_lease(prefill, prefill.lease, now, deaf_seconds)
            elif now >= prefill.deadline:
                waited = "its start" if prefill.stage is Stage.QUEUED else "free blocks here"
                self._give_up(prefill, f"timeout while waiting for {waited}")
        for peer in self._peers.tick(now, deaf_seconds):
            self._drop_peer(peer, f"silent for {peer.silence_seconds:g} s")

    def _tick_lease(self, prefill: RemotePrefill, lease: ReceiverLease, now: float, deaf_seconds: float) -> None:
        lease.ignore_gap(now, deaf_seconds)
        lease.renew(prefill.peer.last_message_at)
        num_bytes = self._transport.num_landed_bytes(prefill.transfer_id)
        if num_bytes > prefill.num_landed_bytes:
            prefill.num_landed_bytes = num_bytes
            lease.progressed(now)
        self._apply(prefill, lease.tick(now))

    # Ends and effects.

    def _give_up(self, prefill: RemotePrefill, reason: str, notify: bool = True) -> None:
        """Ends a prefill: it is no longer needed, or cannot continue."""
        if prefill.lease is not None:
            self._apply(prefill, prefill.lease.cancel(self._clock(), reason))
            return
        if notify:
            self._messages.cancel(prefill)
        self._fall_back(prefill, reason)

    def _apply(self, prefill: RemotePrefill, actions: Actions) -> None:
        for action in actions:
            self._effects[action](prefill)

    def _commit(self, prefill: RemotePrefill) -> None:
        record = self._completed.count(prefill, self._clock())
        self._backoff.succeeded(prefill.peer.endpoint.address)
        self._prefills.remove(prefill, self._clock())
        self._engine.finish_transfer(prefill.request.request_id)
        self.landed.add(prefill.request, record)
        if prefill.ended:
            self.landed.ended(prefill.request)

    def _free(self, prefill: RemotePrefill) -> None:
        lease = prefill.lease
        assert lease is not None
        assert lease.state is State.FREED
        self._counters.num_failed_transfers += 1
        self._counters.num_expired_leases += lease.expired
        if prefill.needed and prefill.peer.open:
            endpoint = prefill.peer.endpoint
            self._backoff.transfer_failed(endpoint.address, endpoint.epoch, self._clock())
        if worth_a_retry(prefill, self._backoff, self._clock()):
            self._retry(prefill, lease.reason)
        else:
            self._fall_back(prefill, lease.reason)

    def _retry(self, prefill: RemotePrefill, reason: str) -> None:
        """Asks the same peer again, which has cached the prompt.

        The blocks stay leased, and are not written in the meantime.
        """
        request = prefill.request
        _log.warning("retrying KV transfer: %s", reason, extra={"request_id": public_id(request)})
        self._counters.num_retries += 1
        self._prefills.remove(prefill, self._clock())
        again = self._ask(prefill.peer, request, prefill.num_cached_tokens, prefill.num_tokens)
        again.num_retries = prefill.num_retries + 1
        again.first_token_at = prefill.first_token_at

    def _fall_back(self, prefill: RemotePrefill, reason: str) -> None:
        """Returns the request to the engine, or the blocks of one that has ended. Ends it if nothing is recomputed."""
        request = prefill.request
        _log.info("remote prefill ended: %s", reason, extra={"request_id": public_id(request)})
        self._prefills.remove(prefill, self._clock())
        request.num_prefill_cached_tokens = 0
        if self._settings.recompute:
            self._engine.prefill_locally(request.request_id)
            return
        worker = prefill.peer.endpoint.worker_id
        message = f"the prompt's KV did not arrive from {worker}, and is not computed here: {reason}"
        self._engine.fail_remote(request.request_id, Unavailable(message, phase=types_pb2.PHASE_TRANSFER))
