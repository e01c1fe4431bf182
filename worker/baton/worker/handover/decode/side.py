"""Prompts that other workers compute for this one: asks, makes room, takes the KV in, and falls back when that fails.

Runs on the engine thread. Every request that is handed over comes back to the engine by exactly one of
finish_transfer, prefill_locally and free_lease; with an open lease, by the latter two only after the fence.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections.abc import Callable

from google.protobuf.message import DecodeError

from baton.rpc.errors import InvalidRequest, Mismatch, ServiceError
from baton.v1 import kv_pb2, types_pb2, worker_pb2
from baton.worker.core import BlockId, FinishReason, Request, TransferTimes
from baton.worker.engine.engine import Engine
from baton.worker.executors.base import Executor, KvLayout
from baton.worker.handover.counters import HandoverCounters
from baton.worker.handover.decode.landed_requests import Landings
from baton.worker.handover.decode.peer_totals import Flows
from baton.worker.handover.decode.prefill_peers import PrefillPeers
from baton.worker.handover.decode.remote_prefill import Exchange, PrefillPeer, Stage
from baton.worker.handover.listener import HandoverListener
from baton.worker.handover.messages import logprobs_of, prefill_submit, public_id
from baton.worker.handover.records import TransferRecord
from baton.worker.handover.settings import HandoverSettings
from baton.worker.requests.outputs import PrefillWanted, StepOutputs
from baton.worker.transfer.base import Inbound, InboundFailed, InboundFenced, Landed, Transport
from baton.worker.transfer.lease import Action, Actions, ReceiverLease, State

_log = logging.getLogger(__name__)

Message = worker_pb2.PrefillStreamRequest

_MAX_RETRIES = 1  # of one request, where its transfer broke midway
_RETRY_SECONDS = 1.0  # that a request must have left for that


class DecodeSide:
    """All prompts that are computed elsewhere. `open_peer` dials an address, `send` queues a message."""

    def __init__(
        self,
        engine: Engine,
        executor: Executor,
        transport: Transport,
        hello: kv_pb2.PeerHello,
        settings: HandoverSettings,
        counters: HandoverCounters,
        open_peer: Callable[[int, str], None],
        send: Callable[[int, Message], None],
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
        self.landings = Landings(engine, listener)
        self.flows = Flows()
        self._peers = PrefillPeers(hello, executor.layout, settings, open_peer, send, close_peer, clock)
        self._backoff = self._peers.backoff
        self._prefill_ids = itertools.count(1)
        self._transfer_ids = itertools.count(1)
        self._expected: dict[Request, types_pb2.Endpoint] = {}
        self._exchanges: dict[Request, Exchange] = {}
        self._transfers: dict[int, Exchange] = {}
        self._reserving: list[Exchange] = []  # in stage STARTED, in order
        self._handlers: dict[str, Callable[[PrefillPeer, worker_pb2.PrefillStreamResponse], None]] = {
            "started": self._on_started,
            "first_token": self._on_first_token,
            "failed": self._on_failed,
            "sent": self._on_sent,
            "abort": self._on_abort,
            "aborted": self._on_aborted,
            "stalled": self._on_stalled,
        }
        self._effects: dict[Action, Callable[[Exchange], None]] = {
            Action.SEND_COMPLETE: self._send_complete,
            Action.SEND_ABORT: self._send_abort,
            Action.SEND_ABORTED: self._send_aborted,
            Action.FENCE: lambda exchange: transport.fence_inbound(exchange.transfer_id),
            Action.FORCE_FENCE: lambda exchange: transport.cut_inbound(exchange.transfer_id),
            Action.COMMIT: self._commit,
            Action.FREE: self._free,
        }

    @property
    def num_exchanges(self) -> int:
        """Requests that are being handed over."""
        return len(self._exchanges)

    def adopt(self, layout: KvLayout) -> None:
        """Other weights are served: prefill workers are greeted again. No exchange is open."""
        self._peers.layout = layout
        self._peers.close_all()

    @property
    def num_peers(self) -> int:
        """Open streams, idle ones included."""
        return len(self._peers)

    @property
    def busy_channels(self) -> list[int]:
        """Streams whose peers wait for signs of life."""
        return [peer.channel for peer in self._peers if peer.exchanges]

    def num_stranded_blocks(self, now: float, seconds: float) -> int:
        """Blocks of leases that were broken longer ago than that, and are not free yet."""
        late = [one for one in self._transfers.values() if one.lease is not None and one.lease.late(now, seconds)]
        return sum(len(exchange.block_ids) for exchange in late)

    def expect(self, request: Request, prefill: types_pb2.Endpoint) -> None:
        """A request that was just submitted may be prefilled by this worker."""
        self._expected[request] = prefill

    # The engine.

    def on_step(self, outputs: StepOutputs) -> None:
        """Call with all that the engine tells, right after a step at the latest, before anything else here."""
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

    def _ask(self, peer: PrefillPeer, request: Request, num_cached_tokens: int, num_tokens: int) -> Exchange:
        now = self._clock()
        if not peer.exchanges:
            peer.heard_at = max(peer.heard_at, now)
        exchange = Exchange(
            peer, next(self._prefill_ids), request, num_cached_tokens, num_tokens, now + self._settings.start_seconds
        )
        peer.exchanges[exchange.prefill_id] = self._exchanges[request] = exchange
        submit = prefill_submit(request, exchange.prefill_id, num_cached_tokens, num_tokens, now)
        self._peers.send(peer, Message(submit=submit))
        return exchange

    def _on_request_ended(self, request: Request, aborted: bool) -> None:
        self._expected.pop(request, None)
        self.landings.ended(request)
        exchange = self._exchanges.get(request)
        if exchange is None:
            return
        if exchange.lease is None or aborted:
            exchange.wanted = False
            self._give_up(exchange, "the request ended")
        exchange.ended = True  # its first token was its last: the rest of the KV is still good for the cache

    # Peers.

    def on_peer_message(self, channel: int, payload: bytes) -> None:
        """A PrefillStreamResponse came."""
        peer = self._peers.at(channel)
        if peer is None:
            return  # closed a moment ago
        peer.heard_at = self._clock()
        try:
            message = worker_pb2.PrefillStreamResponse.FromString(payload)
            kind = message.WhichOneof("message")
            if kind == "hello":
                self._on_hello(peer, message.hello)
            elif kind == "renewal":
                pass  # every message is a sign of life; these may overtake the hello
            elif kind in self._handlers and peer.greeted:
                self._handlers[kind](peer, message)
            else:
                raise InvalidRequest(f"message {kind!r} came {'unknown' if peer.greeted else 'before the hello'}")
        except DecodeError:
            self._drop_peer(peer, "a message on the stream is no PrefillStreamResponse")
        except ServiceError as error:
            self._drop_peer(peer, error.message)

    def on_peer_closed(self, channel: int, reason: str, died: bool = True) -> None:
        """A stream ended, or never came to be. Idempotent. `died`: it is the peer that ended it."""
        peer = self._peers.closed(channel)
        if peer is None:
            return
        now = self._clock()
        for exchange in list(peer.exchanges.values()):
            if died and exchange.computes_there and not exchange.ended:
                self._listener.on_peer_died(exchange.request, peer.endpoint.worker_id, reason)
            if exchange.lease is None:
                self._give_up(exchange, reason)
            else:
                self._apply(exchange, exchange.lease.peer_lost(now))

    def _drop_peer(self, peer: PrefillPeer, reason: str) -> None:
        _log.warning("prefill worker at %s is dropped: %s", peer.endpoint.address, reason)
        self._peers.close(peer)
        self.on_peer_closed(peer.channel, reason, died=False)

    # Messages.

    def _on_hello(self, peer: PrefillPeer, hello: kv_pb2.PeerHello) -> None:
        try:
            self._peers.greeted(peer, hello)
        except Mismatch as error:
            self._counters.num_mismatches += 1
            self._drop_peer(peer, error.message)
            self._peers.mismatched(peer)

    def _on_started(self, peer: PrefillPeer, message: worker_pb2.PrefillStreamResponse) -> None:
        exchange = peer.exchanges.get(message.started.prefill_id)
        if exchange is None or exchange.stage is not Stage.ASKED:
            return
        cached_there = message.started.num_cached_tokens - exchange.num_cached_tokens
        exchange.request.num_prefill_cached_tokens = max(0, cached_there)
        exchange.stage = Stage.STARTED
        exchange.deadline = self._clock() + self._settings.reserve_seconds
        self._reserving.append(exchange)
        self._reserve_all()

    def _on_first_token(self, peer: PrefillPeer, message: worker_pb2.PrefillStreamResponse) -> None:
        first = message.first_token
        exchange = peer.exchanges.get(first.prefill_id)
        if exchange is None or exchange.first_token_at is not None:
            return
        if first.token_id >= self._executor.model.vocab_size:
            raise InvalidRequest(f"the first token is {first.token_id}, outside the vocabulary", field="token_id")
        exchange.first_token_at = self._clock()
        if exchange.lease is not None:
            exchange.lease.progressed(exchange.first_token_at)
        self._engine.accept_first_token(exchange.request.request_id, first.token_id, logprobs_of(first))
        self._listener.on_first_token()

    def _on_failed(self, peer: PrefillPeer, message: worker_pb2.PrefillStreamResponse) -> None:
        exchange = peer.exchanges.get(message.failed.prefill_id)
        if exchange is not None:
            self._counters.num_refused_prefills += 1
            exchange.num_retries = _MAX_RETRIES
            self._give_up(exchange, f"the prefill worker refused: {message.failed.message}", tell=False)

    def _on_sent(self, peer: PrefillPeer, message: worker_pb2.PrefillStreamResponse) -> None:
        exchange = self._transfer(peer, message.sent.transfer_id)
        if exchange is not None and exchange.lease is not None:
            sent = message.sent
            self._apply(exchange, exchange.lease.sent(self._clock(), sent.num_pieces, sent.num_bytes))

    def _on_abort(self, peer: PrefillPeer, message: worker_pb2.PrefillStreamResponse) -> None:
        exchange = self._transfer(peer, message.abort.transfer_id)
        if exchange is None or exchange.lease is None:
            aborted = kv_pb2.TransferAborted(transfer_id=message.abort.transfer_id)
            self._peers.send(peer, Message(aborted=aborted))
        else:
            exchange.broken |= self._transport.num_landed_bytes(exchange.transfer_id) > 0
            self._apply(exchange, exchange.lease.peer_aborts(self._clock(), message.abort.reason))

    def _on_aborted(self, peer: PrefillPeer, message: worker_pb2.PrefillStreamResponse) -> None:
        exchange = self._transfer(peer, message.aborted.transfer_id)
        if exchange is not None and exchange.lease is not None:
            self._apply(exchange, exchange.lease.aborted(self._clock()))

    def _on_stalled(self, peer: PrefillPeer, message: worker_pb2.PrefillStreamResponse) -> None:
        """The peer's device is stuck: nobody waits for it."""
        self._backoff.failed(peer.endpoint.address, peer.endpoint.epoch, self._clock())
        for exchange in list(peer.exchanges.values()):
            exchange.num_retries = _MAX_RETRIES
            self._give_up(exchange, "the prefill worker's device stalls")

    def _transfer(self, peer: PrefillPeer, transfer_id: int) -> Exchange | None:
        exchange = self._transfers.get(transfer_id)
        return exchange if exchange is not None and exchange.peer is peer else None

    # Leases.

    def _reserve_all(self) -> None:
        """Makes room for prompts that are being computed, first come first served."""
        while self._reserving:
            exchange = self._reserving[0]
            block_ids = self._engine.reserve_blocks(exchange.request.request_id)
            if block_ids is None:
                return
            del self._reserving[0]
            self._accept(exchange, block_ids)

    def _accept(self, exchange: Exchange, block_ids: list[BlockId]) -> None:
        settings, block_size = self._settings, self._executor.layout.block_size
        exchange.stage = Stage.LEASED
        exchange.leased_at = self._clock()
        exchange.block_ids = tuple(block_ids)
        exchange.transfer_id = next(self._transfer_ids)
        exchange.lease = ReceiverLease(
            exchange.leased_at, settings.lease_seconds, settings.stall_seconds, self._transport.fences_locally
        )
        self._transfers[exchange.transfer_id] = exchange
        generation = secrets.randbits(64)
        inbound = Inbound(exchange.transfer_id, self._hello.epoch, generation, exchange.block_ids, settings.verify)
        self._transport.open(inbound)
        descriptor = kv_pb2.TransferDescriptor(
            transfer_id=exchange.transfer_id,
            sender_epoch=exchange.peer.epoch,
            receiver_epoch=self._hello.epoch,
            first_block=exchange.num_cached_tokens // block_size,
            block_ids=block_ids,
            generation=generation,
            lease_ms=round(settings.lease_seconds * 1000),
            transports=self._transport.addresses,
            checksum=settings.verify,
        )
        accept = worker_pb2.PrefillAccept(prefill_id=exchange.prefill_id, transfer=descriptor)
        self._peers.send(exchange.peer, Message(accept=accept))

    def on_landed(self, event: Landed) -> None:
        """The transport has every block."""
        exchange = self._transfers.get(event.transfer_id)
        if exchange is not None and exchange.lease is not None:
            exchange.num_landed_bytes = event.num_bytes
            self._apply(exchange, exchange.lease.landed(self._clock(), event.num_pieces, event.num_bytes))

    def on_inbound_failed(self, event: InboundFailed) -> None:
        """What arrived was wrong, or will not arrive."""
        self._counters.num_checksum_errors += event.corrupt
        exchange = self._transfers.get(event.transfer_id)
        if exchange is not None and exchange.lease is not None:
            exchange.broken = True
            self._apply(exchange, exchange.lease.cancel(self._clock(), event.reason))

    def on_inbound_fenced(self, event: InboundFenced) -> None:
        """Nothing is written any more."""
        exchange = self._transfers.get(event.transfer_id)
        if exchange is not None and exchange.lease is not None:
            self._apply(exchange, exchange.lease.fenced())

    # Time.

    def tick(self, now: float, deaf_seconds: float) -> None:
        """Ends what is overdue. For deaf_seconds before now nobody was listened to."""
        self._reserve_all()
        for exchange in list(self._exchanges.values()):
            if exchange.lease is not None:
                self._tick_lease(exchange, exchange.lease, now, deaf_seconds)
            elif now >= exchange.deadline:
                waited = "its start" if exchange.stage is Stage.ASKED else "room here"
                self._give_up(exchange, f"it waited too long for {waited}")
        for peer in self._peers.tick(now, deaf_seconds):
            self._drop_peer(peer, f"it said nothing for {peer.patience:g} s")

    def _tick_lease(self, exchange: Exchange, lease: ReceiverLease, now: float, deaf_seconds: float) -> None:
        lease.excuse(now, deaf_seconds)
        lease.heard(exchange.peer.heard_at)
        num_bytes = self._transport.num_landed_bytes(exchange.transfer_id)
        if num_bytes > exchange.num_landed_bytes:
            exchange.num_landed_bytes = num_bytes
            lease.progressed(now)
        self._apply(exchange, lease.tick(now))

    # Ends and effects.

    def _give_up(self, exchange: Exchange, reason: str, tell: bool = True) -> None:
        """The prefill is not wanted any more, or not to be had."""
        if exchange.lease is not None:
            self._apply(exchange, exchange.lease.cancel(self._clock(), reason))
            return
        if tell:
            cancel = worker_pb2.PrefillCancel(prefill_id=exchange.prefill_id)
            self._peers.send(exchange.peer, Message(cancel=cancel))
        self._fall_back(exchange, reason)

    def _apply(self, exchange: Exchange, actions: Actions) -> None:
        for action in actions:
            self._effects[action](exchange)

    def _send_complete(self, exchange: Exchange) -> None:
        complete = kv_pb2.TransferComplete(transfer_id=exchange.transfer_id)
        self._peers.send(exchange.peer, Message(complete=complete))

    def _send_abort(self, exchange: Exchange) -> None:
        assert exchange.lease is not None
        abort = kv_pb2.TransferAbort(transfer_id=exchange.transfer_id, reason=exchange.lease.reason)
        self._peers.send(exchange.peer, Message(abort=abort))

    def _send_aborted(self, exchange: Exchange) -> None:
        aborted = kv_pb2.TransferAborted(transfer_id=exchange.transfer_id)
        self._peers.send(exchange.peer, Message(aborted=aborted))

    def _commit(self, exchange: Exchange) -> None:
        counters = self._counters
        counters.num_transfers += 1
        counters.num_transfer_bytes += exchange.num_landed_bytes
        counters.transfer_bytes.observe(exchange.num_landed_bytes)
        record = self._record_of(exchange)
        counters.transfer_seconds.observe(record.seconds)
        counters.exposed_seconds.observe(record.exposed_seconds)
        self.flows.received(exchange.peer.endpoint.worker_id, record.num_bytes)
        exchange.request.transfer = TransferTimes(record.num_bytes, record.seconds, record.exposed_seconds)
        self._backoff.succeeded(exchange.peer.endpoint.address)
        self._forget(exchange)
        self._engine.finish_transfer(exchange.request.request_id)
        self.landings.add(exchange.request, record)
        if exchange.ended:
            self.landings.ended(exchange.request)

    def _free(self, exchange: Exchange) -> None:
        lease = exchange.lease
        assert lease is not None
        assert lease.state is State.FREED
        self._counters.num_failed_transfers += 1
        self._counters.num_expired_leases += lease.expired
        if exchange.wanted and exchange.peer.open:
            endpoint = exchange.peer.endpoint
            self._backoff.stumbled(endpoint.address, endpoint.epoch, self._clock())
        if self._worth_a_retry(exchange):
            self._retry(exchange, lease.reason)
        else:
            self._fall_back(exchange, lease.reason)

    def _worth_a_retry(self, exchange: Exchange) -> bool:
        request, endpoint, now = exchange.request, exchange.peer.endpoint, self._clock()
        return (
            exchange.broken
            and exchange.wanted
            and not exchange.ended
            and exchange.num_retries < _MAX_RETRIES
            and exchange.peer.open
            and self._backoff.allows(endpoint.address, endpoint.epoch, now)
            and (request.deadline is None or now + _RETRY_SECONDS < request.deadline)
        )

    def _retry(self, exchange: Exchange, reason: str) -> None:
        """Asks the same peer again, which has the prompt cached. The blocks stay leased; nobody writes them now."""
        request = exchange.request
        _log.warning("KV transfer is tried again: %s", reason, extra={"request_id": public_id(request)})
        self._counters.num_retries += 1
        self._forget(exchange)
        again = self._ask(exchange.peer, request, exchange.num_cached_tokens, exchange.num_tokens)
        again.num_retries = exchange.num_retries + 1
        again.first_token_at = exchange.first_token_at

    def _record_of(self, exchange: Exchange) -> TransferRecord:
        kinds = self._transport.totals_by_kind().items()
        return TransferRecord(
            request_id=public_id(exchange.request),
            traceparent=exchange.request.traceparent,
            transport=",".join(name for name, totals in kinds if totals.num_received_bytes),
            num_bytes=exchange.num_landed_bytes,
            num_retries=exchange.num_retries,
            started_at=exchange.leased_at,
            first_token_at=exchange.first_token_at,
            landed_at=self._clock(),
        )

    def _forget(self, exchange: Exchange) -> None:
        del self._exchanges[exchange.request]
        del exchange.peer.exchanges[exchange.prefill_id]
        exchange.peer.idle_since = self._clock()
        self._transfers.pop(exchange.transfer_id, None)
        if exchange in self._reserving:
            self._reserving.remove(exchange)

    def _fall_back(self, exchange: Exchange, reason: str) -> None:
        """The engine has its request back, or the blocks of one that ended."""
        request = exchange.request
        _log.info("remote prefill ended: %s", reason, extra={"request_id": public_id(request)})
        self._forget(exchange)
        request.num_prefill_cached_tokens = 0
        self._engine.prefill_locally(request.request_id)
