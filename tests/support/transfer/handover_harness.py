"""Workers without processes: engine, simulated device, hand-over and real TCP.

The harness pumps the gRPC streams between them, so that tests can cut, silence and kill at any time.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from support.engine.engine_harness import BLOCK_SIZE, Collected, expected_for, make_executor

from baton.v1 import types_pb2, worker_pb2
from baton.worker.core import Request
from baton.worker.engine.engine import Engine
from baton.worker.executors.sim.executor import SimExecutor
from baton.worker.handover.handover import Handover
from baton.worker.handover.settings import HandoverSettings
from baton.worker.link.frames import Kind
from baton.worker.requests.outputs import StepOutputs
from baton.worker.scheduling.settings import EngineSettings
from baton.worker.transfer.transports import Transports

_EPOCHS = itertools.count(1000)

Frame = tuple[int, int, bytes]


class Link:
    """The link's engine end, which sends the hand-over's messages to the network."""

    def __init__(self, deliver: Callable[[int, int, bytes], None]) -> None:
        self._deliver = deliver

    def send(self, kind: int, channel: int = 0, payload: bytes = b"") -> None:
        self._deliver(kind, channel, payload)

    def post(self, kind: int, channel: int = 0, payload: bytes = b"") -> None:
        self._deliver(kind, channel, payload)

    def flush(self) -> None:
        pass


@dataclass(eq=False)
class Stream:
    """A PrefillStream between two nodes."""

    decode: Node
    decode_channel: int
    prefill: Node
    prefill_channel: int


class Network:
    """All nodes by address, and the streams between them."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self.streams: list[Stream] = []
        self.lock = threading.Lock()
        self.tap: Callable[[Node, int, bytes], bytes | None] = lambda node, kind, payload: payload  # None: lost
        self._channels = itertools.count(1)

    def deliver(self, node: Node, kind: int, channel: int, payload: bytes) -> None:
        """Delivers a node's message. Thread-safe."""
        with self.lock:
            if kind == Kind.PEER_OPEN:
                self._open(node, channel, payload.decode())
                return
            stream = self._stream_of(node, kind, channel)
            if stream is None:
                return
            if kind == Kind.PEER_CLOSE:
                self._cut(stream, notify_decode=False)
            elif kind == Kind.PREFILL_CLOSE:
                self._cut(stream, notify_prefill=False)
            elif (tapped := self.tap(node, kind, payload)) is not None:
                if kind == Kind.PEER:
                    stream.prefill.inbox.append((Kind.PREFILL, stream.prefill_channel, tapped))
                else:
                    stream.decode.inbox.append((Kind.PEER, stream.decode_channel, tapped))

    def cut(self, *nodes: Node) -> None:
        """Ends all streams of these nodes, at both ends."""
        with self.lock:
            for stream in list(self.streams):
                if stream.decode in nodes or stream.prefill in nodes:
                    self._cut(stream)

    def _open(self, node: Node, channel: int, address: str) -> None:
        prefill = self.nodes.get(address)
        if prefill is None or not prefill.alive:
            node.inbox.append((Kind.PEER_CLOSE, channel, b"no connection"))
            return
        stream = Stream(node, channel, prefill, next(self._channels))
        self.streams.append(stream)
        prefill.inbox.append((Kind.PREFILL_OPEN, stream.prefill_channel, b""))

    def _stream_of(self, node: Node, kind: int, channel: int) -> Stream | None:
        outgoing = kind in (Kind.PEER, Kind.PEER_CLOSE)
        for stream in self.streams:
            end = (stream.decode, stream.decode_channel) if outgoing else (stream.prefill, stream.prefill_channel)
            if end == (node, channel):
                return stream
        return None

    def _cut(self, stream: Stream, notify_decode: bool = True, notify_prefill: bool = True) -> None:
        self.streams.remove(stream)
        if notify_decode:
            stream.decode.inbox.append((Kind.PEER_CLOSE, stream.decode_channel, b"the stream was cut"))
        if notify_prefill:
            stream.prefill.inbox.append((Kind.PREFILL_CLOSE, stream.prefill_channel, b""))


@dataclass(eq=False)
class Node:
    """A worker's engine thread, whose loop the test runs."""

    network: Network
    name: str
    executor: SimExecutor
    engine: Engine
    transport: Transports
    inbox: deque[Frame] = field(default_factory=deque)
    seen: Collected = field(default_factory=Collected)
    alive: bool = True
    frozen: bool = False
    handover: Handover = field(init=False)

    @property
    def endpoint(self) -> types_pb2.Endpoint:
        return types_pb2.Endpoint(worker_id=self.name, epoch=self.engine.epoch, address=self.name)

    def run_once(self) -> StepOutputs | None:
        """Runs one iteration of the engine loop."""
        if not self.alive or self.frozen:
            return None
        self.run_without_step()
        outputs = self.engine.step()
        self.handover.on_step(outputs)
        return self.seen.add(outputs)

    def run_without_step(self) -> None:
        """Runs one iteration without a step: only messages and deadlines."""
        for _ in range(len(self.inbox)):
            kind, channel, payload = self.inbox.popleft()
            self.handover.handlers[kind](channel, payload)
        self.handover.tick()

    def submit(self, request: Request, prefill: Node | types_pb2.Endpoint) -> None:
        request.remote_prefill = True
        self.engine.submit(request)
        self.handover.expect(request, prefill.endpoint if isinstance(prefill, Node) else prefill)

    def kill(self) -> None:
        """Ends the node as SIGKILL would: closes its sockets and streams, and never runs again."""
        self.alive = False
        self.handover.close()
        self.network.cut(self)
        self.inbox.clear()

    def assert_nothing_held(self) -> None:
        audit = self.engine.audit()
        assert (audit.num_held_blocks, audit.num_leased_blocks) == (0, 0), f"{self.name}: {audit}"
        assert self.handover.num_open == 0, self.name


def make_node(
    network: Network,
    name: str,
    executor: SimExecutor | None = None,
    settings: HandoverSettings | None = None,
    transfer_address: Callable[[int], str] | None = None,
    port: int = 0,
    **values: object,
) -> Node:
    """Returns a worker. `transfer_address` maps its listener's port to the address of a proxy."""
    executor = executor or make_executor()
    defaults: dict[str, object] = {"max_num_requests": 32, "max_num_batched_tokens": 64, "min_remote_prefill_tokens": 4}
    engine = Engine(executor, EngineSettings(**{**defaults, **values}), next(_EPOCHS))  # type: ignore[arg-type]
    transport = Transports(executor, "127.0.0.1", port, "127.0.0.1", lambda: None)
    if transfer_address is not None:
        transport = _Redirected(executor, transport, transfer_address)
    node = Node(network, name, executor, engine, transport)
    link = Link(lambda kind, channel, payload: network.deliver(node, kind, channel, payload) if node.alive else None)
    node.handover = Handover(
        engine,
        executor,
        transport,
        link,
        name,
        settings or HandoverSettings(lease_seconds=0.4, connect_seconds=0.8, verify=True),
    )
    network.nodes[name] = node
    return node


class _Redirected(Transports):
    """A transport that advertises another address than its listener's."""

    def __init__(self, executor: SimExecutor, inner: Transports, redirect: Callable[[int], str]) -> None:
        self.__dict__.update(inner.__dict__)
        self._redirect = redirect(int(inner.addresses[0].address.rpartition(":")[2]))

    @property
    def addresses(self):
        (address,) = super().addresses
        address.address = self._redirect
        return [address]


def run_until(nodes: Sequence[Node], done: Callable[[], bool], seconds: float = 10.0) -> None:
    """Runs all nodes until `done`."""
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, f"not done after {seconds} s: " + ", ".join(
            f"{node.name} open={node.handover.num_open} {node.engine.load()}" for node in nodes
        )
        busy = [bool(node.run_once()) for node in nodes]
        if not any(busy):
            time.sleep(0.001)


def finished(node: Node, *requests: Request) -> Callable[[], bool]:
    """Returns a condition: whether all of these requests have ended."""
    ids = [request.request_id for request in requests]
    return lambda: all(name in node.seen.finishes or name in node.seen.failures for name in ids)


def idle(*nodes: Node) -> Callable[[], bool]:
    """Returns a condition: whether no request runs and no transfer is open."""
    return lambda: all(
        not node.alive or (node.handover.num_open == 0 and not node.engine.has_work() and not node.inbox)
        for node in nodes
    )


def falls_back(pair: Sequence[Node], request: Request, seconds: float = 10.0) -> None:
    """Asserts that the request has the right answer, wherever it is prefilled, and that no resources are held."""
    decode = pair[-1]
    run_until(pair, finished(decode, request), seconds)
    assert decode.seen.tokens[request.request_id] == expected_for(request)
    finish = decode.seen.finishes[request.request_id]
    assert finish.queue_seconds >= 0
    assert finish.prefill_seconds >= 0
    run_until(pair, idle(*pair))
    for node in pair:
        if node.alive:
            node.assert_nothing_held()


def at_message(network: Network, name: str, act: list[str], before: bool = True) -> None:
    """Calls `act` when the first message of that name passes. With `before`, drops the message."""
    seen = threading.Event()

    def tap(node, kind, payload):
        message = (worker_pb2.PrefillStreamRequest if kind == Kind.PEER else worker_pb2.PrefillStreamResponse)()
        message.ParseFromString(payload)
        if message.WhichOneof("message") == name and not seen.is_set():
            seen.set()
            act.append(name)
            return None if before else payload
        return payload

    network.tap = tap


__all__ = [
    "BLOCK_SIZE",
    "Network",
    "Node",
    "Stream",
    "at_message",
    "falls_back",
    "finished",
    "idle",
    "make_node",
    "run_until",
]
