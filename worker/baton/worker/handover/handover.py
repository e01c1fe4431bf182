"""Connects both sides of a worker's hand-overs with the link to its front and with its transport. Decides nothing.

The engine loop passes it the frames of the kinds in `handlers` and all outputs of the engine, and calls `tick` once a
turn, after the turn's frames.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import Protocol

from baton.rpc.errors import ServiceError, Unavailable, status_of
from baton.v1 import control_pb2, kv_pb2, types_pb2, worker_pb2
from baton.worker.core import Request
from baton.worker.engine.adapters.directory import AdapterDirectory
from baton.worker.engine.engine import Engine
from baton.worker.executors.base import Executor
from baton.worker.handover.bandwidth import Bandwidth
from baton.worker.handover.counters import HandoverCounters, counters_message
from baton.worker.handover.decode.side import DecodeSide
from baton.worker.handover.heartbeat import Beat, Heartbeat, LeaseRenewal
from baton.worker.handover.listener import HandoverListener, HandoverListeners
from baton.worker.handover.prefill.side import PrefillSide
from baton.worker.handover.settings import MAX_BEAT_SECONDS, HandoverSettings
from baton.worker.kv_spec import KvSpec
from baton.worker.link.frames import Kind
from baton.worker.link.prompts import split_prompts
from baton.worker.requests.outputs import EngineListener, PrefillStarted, StepOutputs
from baton.worker.requests.state import GroupSpan
from baton.worker.transfer.base import (
    InboundFailed,
    InboundFenced,
    Landed,
    Pushed,
    PushFailed,
    PushFenced,
    Transport,
)
from baton.worker.transfer.layout import layout_message

_log = logging.getLogger(__name__)

_TICK_SECONDS = 0.05
_IDLE_TICK_SECONDS = 1.0  # while streams are open, but no transfer
_STRANDED_SECONDS = 2.0  # the longest that the end of a lease takes


class Link(Protocol):
    """The part of the link to the front that the hand-over uses."""

    def send(self, kind: int, channel: int = 0, payload: bytes = b"") -> None:
        """Queues a frame."""

    def flush(self) -> None:
        """Sends queued frames."""

    def post(self, kind: int, channel: int = 0, payload: bytes = b"") -> None:
        """Sends a frame from any thread, even while the engine thread computes."""


class Handover(EngineListener):
    """One worker's hand-overs, as a prefill worker and as a decode worker."""

    def __init__(
        self,
        engine: Engine,
        executor: Executor,
        transport: Transport,
        link: Link,
        worker_id: str,
        settings: HandoverSettings,
        clock: Callable[[], float] = time.monotonic,
        renewal: LeaseRenewal | None = None,  # None: a thread
        adapters: AdapterDirectory | None = None,  # of requests of other workers; None: they have none
    ) -> None:
        hello = kv_pb2.PeerHello(
            worker_id=worker_id,
            epoch=engine.epoch,
            layout=layout_message(executor.kv_spec),
            transports=transport.addresses,
        )
        self._hello = hello  # sent by both sides
        self._transport = transport
        self._link = link
        self._clock = clock
        self._counters = HandoverCounters()
        self._listeners = HandoverListeners()
        self._heartbeat = renewal or Heartbeat(settings.hang_seconds, clock)
        self._beats = False  # whether any peer receives heartbeats
        self._ticked_at = self._checked_at = clock()
        self._bandwidth = Bandwidth()
        self._bandwidth_of: dict[str, Bandwidth] = {}  # by transport
        heartbeat = kv_pb2.LeaseRenewal(epoch=engine.epoch)
        self._to_decode = worker_pb2.PrefillStreamResponse(renewal=heartbeat).SerializeToString()
        self._to_prefill = worker_pb2.PrefillStreamRequest(renewal=heartbeat).SerializeToString()
        self.prefill_side = PrefillSide(
            engine,
            executor,
            transport,
            hello,
            settings,
            self._counters,
            lambda channel, message: link.send(Kind.PREFILL, channel, message.SerializeToString()),
            link.flush,
            self._close_prefill_stream,
            self._listeners,
            clock,
            adapters,
        )
        self.decode_side = DecodeSide(
            engine,
            executor,
            transport,
            hello,
            settings,
            self._counters,
            lambda channel, address: link.send(Kind.PEER_OPEN, channel, address.encode()),
            lambda channel, message: link.send(Kind.PEER, channel, message.SerializeToString()),
            lambda channel: link.send(Kind.PEER_CLOSE, channel),
            self._listeners,
            clock,
        )
        engine.listen(self)

    @cached_property
    def handlers(self) -> Mapping[int, Callable[[int, bytes], None]]:
        """The handlers of the link's frames, by kind."""
        return {
            Kind.PREFILL_OPEN: lambda channel, _: self.prefill_side.on_peer_open(channel),
            Kind.PREFILL: self.prefill_side.on_peer_message,
            Kind.PREFILL_HASHED: self._on_hashed_prefill,
            Kind.PREFILL_CLOSE: lambda channel, _: self.prefill_side.on_peer_closed(channel),
            Kind.PEER: self.decode_side.on_peer_message,
            Kind.PEER_CLOSE: lambda channel, reason: self.decode_side.on_peer_closed(channel, reason.decode()),
        }

    def listen(self, listener: HandoverListener) -> None:
        """Adds a listener. Listeners are called in the order in which they were added."""
        self._listeners.add(listener)

    @property
    def num_prefills(self) -> int:
        """Prefills of other workers that hold blocks here, or will."""
        return self.prefill_side.num_jobs

    @property
    def num_open(self) -> int:
        """Prefills and transfers that have not ended, on both sides."""
        return self.prefill_side.num_jobs + self.decode_side.num_remote_prefills

    @property
    def deadline(self) -> float | None:
        """The time at which `tick` must be called next. None: after the next frame or step."""
        num_open = self.num_open
        if not num_open and not self.decode_side.num_peers:
            return None
        return self._checked_at + (_TICK_SECONDS if num_open else _IDLE_TICK_SECONDS)

    @property
    def transfer_bytes_per_second(self) -> float:
        """Bytes a second, measured while bytes were received. 0: unknown."""
        return self._bandwidth.received

    def expect(self, request: Request, prefill: types_pb2.Endpoint) -> None:
        """Registers a submitted request that may be prefilled by the worker at `prefill`."""
        self.decode_side.expect(request, prefill)

    def num_prefill_cached_tokens(self, request: Request) -> int:
        """Returns how many of a finished request's transferred tokens the prefill worker had cached."""
        return request.num_prefill_cached_tokens

    def begin_drain(self) -> None:
        """Refuses new prefills of other workers. Idempotent."""
        self.prefill_side.draining = True

    def end_drain(self) -> None:
        """Accepts prefills of other workers again. Idempotent."""
        self.prefill_side.draining = False

    def adopt(self, spec: KvSpec) -> None:
        """Adopts other weights. Nothing is open; sends every peer a new hello."""
        self._hello.layout.CopyFrom(layout_message(spec))
        self.prefill_side.adopt(spec, Unavailable("this worker's weights have changed; send a new hello"))
        self.decode_side.adopt(spec)

    def abort_all(self, reason: str) -> None:
        """Fails the running prefills of other workers."""
        self.prefill_side.abort_all(reason)

    def flows(self) -> Collection[worker_pb2.KvFlow]:
        """Returns the KV received from each sender."""
        return self.decode_side.peer_totals.messages()

    def counters(self) -> HandoverCounters:
        """Returns a copy of the totals."""
        counters = self._counters.copy()
        totals = self._transport.totals()
        counters.num_stray_pieces, counters.num_strangers = totals.num_stray_pieces, totals.num_strangers
        return counters

    def counters_message(self) -> control_pb2.TransferCounters:
        """Returns the contract's message of the totals and the current values."""
        self._measure()
        rates = [bandwidth.message(name) for name, bandwidth in self._bandwidth_of.items() if bandwidth.known]
        return counters_message(self.counters(), self.num_stranded_blocks(), rates)

    def num_stranded_blocks(self) -> int:
        """Returns the blocks of broken leases that should be free, but are not. Always 0."""
        now = self._clock()
        sides = (self.prefill_side, self.decode_side)
        return sum(side.num_stranded_blocks(now, _STRANDED_SECONDS) for side in sides)

    def on_prefill_started(self, started: PrefillStarted) -> None:
        self.prefill_side.on_prefill_started(started)

    def on_windows_moved(self, request: Request, windows: Sequence[GroupSpan]) -> None:
        self.prefill_side.on_windows_moved(request, windows)

    def on_launched(self, began: float) -> None:
        self.decode_side.landed.launched(began)

    def on_step(self, outputs: StepOutputs) -> None:
        """Handles outputs of the engine. Call right after a step at the latest."""
        self.prefill_side.on_step(outputs)
        if outputs.first_tokens:
            self._link.flush()  # a client waits for each first token
        self.decode_side.on_step(outputs)

    def tick(self) -> None:
        """Handles transport events and deadlines. Cheap when nothing is open."""
        now = self._clock()
        # Messages that arrived while this thread computed are still unread: the silence is not the peers'.
        gap = now - self._ticked_at
        deaf_seconds = gap if gap > MAX_BEAT_SECONDS else 0.0
        self._ticked_at = now
        self._heartbeat.alive(now)
        self._handle_events()
        due = self.deadline
        if deaf_seconds or (due is not None and now >= due):
            self._checked_at = now
            self.prefill_side.tick(now, deaf_seconds)
            self.decode_side.tick(now, deaf_seconds)
            self._measure()
        self._beat()
        self._link.flush()  # peers should not wait for the next step

    def close(self) -> None:
        """Ends the threads and the transport. Idempotent."""
        self._heartbeat.close()
        self._transport.close()

    def _handle_events(self) -> None:
        for event in self._transport.poll():
            match event:
                case Landed():
                    self.decode_side.on_landed(event)
                case InboundFailed():
                    self.decode_side.on_inbound_failed(event)
                case InboundFenced():
                    self.decode_side.on_inbound_fenced(event)
                case Pushed():
                    self.prefill_side.on_pushed(event)
                case PushFailed():
                    self.prefill_side.on_push_failed(event)
                case PushFenced():
                    self.prefill_side.on_push_fenced(event)

    def _beat(self) -> None:
        prefilling, decoding = self.prefill_side.busy_channels, self.decode_side.busy_channels
        if not prefilling and not decoding and not self._beats:
            return
        beats: dict[object, Beat] = {}
        for channel in prefilling:
            beats[Kind.PREFILL, channel] = self._beat_of(Kind.PREFILL, channel, self._to_decode)
        for channel in decoding:
            beats[Kind.PEER, channel] = self._beat_of(Kind.PEER, channel, self._to_prefill)
        self._beats = bool(beats)
        self._heartbeat.set(beats, self.prefill_side.beat_seconds)

    def _beat_of(self, kind: Kind, channel: int, payload: bytes) -> Beat:
        return lambda: self._link.post(kind, channel, payload)

    def _measure(self) -> None:
        self._bandwidth.observe(self._transport.totals())
        for name, totals in self._transport.totals_by_kind().items():
            self._bandwidth_of.setdefault(name, Bandwidth()).observe(totals)

    def _on_hashed_prefill(self, channel: int, payload: bytes) -> None:
        message, prompts = split_prompts(payload)
        self.prefill_side.on_peer_message(channel, message, prompts[0])

    def _close_prefill_stream(self, channel: int, error: ServiceError) -> None:
        self._link.send(Kind.PREFILL_CLOSE, channel, status_of(error).SerializeToString())
