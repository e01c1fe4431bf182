"""Measures what a hand-over costs both engine threads: CPU time of their calls, by the prompt's length.

baton bench handover [--tokens 2048 8192 32768] [--rounds 6]

Two workers without processes hand prompts over on the simulated device, whose own time is excluded. Their pools are
full of older prompts, so that every allocation evicts a block. Only the transport uses sockets.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from support.transfer.handover_harness import Network, Node, make_node

from baton.rpc.block_hash import cache_namespace
from baton.v1 import types_pb2, worker_pb2
from baton.worker.core import RowInit, SamplingParams, StepPlan
from baton.worker.executors.cpu.rows import Rows
from baton.worker.executors.sim.executor import SimExecutor, SimSettings, SimSpeed
from baton.worker.handover.settings import HandoverSettings
from baton.worker.kv.event_log import EventLog
from baton.worker.link.frames import Kind
from baton.worker.link.prompts import PromptReader, join_prompts, split_prompts
from baton.worker.process.sessions import Sessions

BLOCK_SIZE = 16
NUM_WARM = 3  # rounds that fill the pools
STEPS_BEFORE = 16  # of the decode worker, before the prefill worker begins
VOCAB_SIZE = 128_000
SAMPLING = types_pb2.SamplingParams(
    temperature=0.7,
    top_p=0.95,
    top_k=0,
    min_p=0.0,
    seed=1,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    repetition_penalty=1.0,
)

Costs = dict[str, list[float]]  # seconds of CPU, by call


class Stopwatch:
    """Measures CPU time of the calling thread, minus the time in the device."""

    def __init__(self) -> None:
        self.costs: Costs = defaultdict(list)
        self._left_out = 0.0

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        before, left_out = time.thread_time(), self._left_out
        yield
        self.costs[name].append(time.thread_time() - before - (self._left_out - left_out))

    def leave_out(self, call: Callable[..., object]) -> Callable[..., object]:
        """Returns the call, excluded from measured times."""

        def measured(*arguments: object) -> object:
            before = time.thread_time()
            try:
                return call(*arguments)
            finally:
                self._left_out += time.thread_time() - before

        return measured


class Turner:
    """One worker's engine loop, with the time of every call."""

    def __init__(self, node: Node, watch: Stopwatch, label: str, reader: PromptReader) -> None:
        self._node = node
        self._watch = watch
        self._label = label
        self._reader = reader
        self.frames: list[tuple[int, int, bytes]] = []
        self.sessions = Sessions(node.engine, node.executor.model, node.name, self._sent, node.handover)
        self.sessions.open(1)
        self.events = EventLog(node.engine, node.name, self._sent)
        self.events.open(1)
        executor = node.executor
        self._launch, self._finish_transfer = watch.leave_out(executor.launch), node.engine.finish_transfer
        self._arrived: float | None = None  # when the last block of a prompt was reported to the engine
        executor.launch = self._launched  # type: ignore[method-assign]
        node.engine.finish_transfer = self._transferred  # type: ignore[method-assign]
        executor.collect = watch.leave_out(executor.collect)  # type: ignore[method-assign]

    def run_once(self) -> None:
        """Runs one iteration of EngineLoop."""
        node, of = self._node, self._watch.of
        for _ in range(len(node.inbox)):
            kind, channel, payload = node.inbox.popleft()
            if kind == Kind.PREFILL:
                name = str(worker_pb2.PrefillStreamRequest.FromString(payload).WhichOneof("message"))
                message, prompts = asyncio.run(self._reader.read_prefill(payload))
                if prompts:
                    kind, payload = Kind.PREFILL_HASHED, join_prompts(message, prompts)
            else:
                response = kind == Kind.PEER and worker_pb2.PrefillStreamResponse.FromString(payload)
                name = str(response.WhichOneof("message")) if response else Kind(kind).name
            with of(f"{self._label}: message {name}"):
                node.handover.handlers[kind](channel, payload)
        with of(f"{self._label}: transport and time"):
            node.handover.tick()
        with of(f"{self._label}: step"):
            outputs = node.engine.step()
        with of(f"{self._label}: after the step"):
            node.handover.on_step(outputs)
            self.sessions.emit(outputs)
        with of(f"{self._label}: cache events"):
            self.events.collect()

    def submit(self, token_ids: list[int], prefill: Node, max_tokens: int) -> None:
        """Submits a gateway's request, as the front does."""
        submit = worker_pb2.SubmitRequest(
            request_id="r",
            prompt_token_ids=token_ids,
            sampling=SAMPLING,
            stop=types_pb2.StopConditions(max_tokens=max_tokens, ignore_eos=True),
            cache_namespace=cache_namespace(bytes(16), BLOCK_SIZE),
            prefill=prefill.endpoint,
        )
        message = worker_pb2.GenerateStreamRequest(submits=[submit]).SerializeToString()
        began = time.thread_time()
        payload = join_prompts(*asyncio.run(self._reader.read_generate(message)))
        self._watch.costs["front: parse and hash, in slices"].append(time.thread_time() - began)
        with self._watch.of(f"{self._label}: submit"):
            self.sessions.receive(1, *split_prompts(payload))

    def _transferred(self, request_id: str) -> None:
        self._arrived = time.thread_time()
        self._finish_transfer(request_id)

    def _launched(self, plan: StepPlan) -> None:
        if self._arrived is not None and plan.admitted:
            self._watch.costs[f"{self._label}: from the last block to the launch"].append(
                time.thread_time() - self._arrived
            )
            self._arrived = None
        self._launch(plan)

    def _sent(self, kind: int, channel: int, payload: bytes) -> None:
        self.frames.append((kind, channel, payload))


def main(argv: list[str] | None = None) -> int:
    """Hands over prompts of each length, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192, 32768])
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args(argv)
    tables = [measure(num_tokens, options.rounds) for num_tokens in options.tokens]
    names = sorted(tables[-1], key=lambda name: -min(tables[-1][name]))
    print("milliseconds of CPU: of each call the dearest in a hand-over, of the round that was disturbed the least")
    print(f"{'call':<44}" + "".join(f"{num_tokens:>10}" for num_tokens in options.tokens))
    for name in names:
        cells = (f"{1e3 * min(table[name]):.3f}" if name in table else "-" for table in tables)
        print(f"{name:<44}" + "".join(f"{cell:>10}" for cell in cells))
    return 0


def measure(num_tokens: int, rounds: int) -> dict[str, list[float]]:
    """Returns the largest cost of each call, in every hand-over after the first few."""
    network = Network()
    watch = Stopwatch()
    reader = PromptReader(BLOCK_SIZE, 2 * num_tokens)
    settings = HandoverSettings(lease_seconds=5.0, connect_seconds=5.0)
    nodes = [make_node(network, name, _executor(num_tokens), settings, **_LIMITS) for name in ("prefill", "decode")]
    prefill, decode = (Turner(node, watch, node.name, reader) for node in nodes)
    largest: dict[str, list[float]] = defaultdict(list)
    generator = np.random.default_rng(7)
    for number in range(NUM_WARM + rounds):
        watch.costs.clear()
        decode.submit(generator.integers(5, VOCAB_SIZE, num_tokens).tolist(), nodes[0], max_tokens=16)
        for _ in range(STEPS_BEFORE):
            decode.run_once()
        deadline = time.monotonic() + 60
        while decode.sessions.num_requests or any(node.handover.num_open for node in nodes):
            assert time.monotonic() < deadline, "a hand-over does not end"
            prefill.run_once()
            decode.run_once()
        admit(watch, num_tokens)
        if number >= NUM_WARM:
            for name, costs in watch.costs.items():
                largest[name].append(max(costs))
    for node in nodes:
        node.handover.close()
    return largest


def admit(watch: Stopwatch, num_tokens: int) -> None:
    """Measures the executor's bookkeeping for a row that enters its batch."""
    rows = Rows(4, 2 * num_tokens, BLOCK_SIZE, 0)
    init = RowInit(0, np.arange(num_tokens, dtype=np.int32), num_tokens, SamplingParams())  # type: ignore[arg-type]
    block_ids = list(range(num_tokens // BLOCK_SIZE))
    rows.admit(init)
    with watch.of("executor: a row's tokens and blocks"):
        rows.admit(init)
        rows.add_blocks(0, block_ids)  # type: ignore[arg-type]


_LIMITS: dict[str, object] = {"max_num_batched_tokens": 8192, "max_num_requests": 32}


def _executor(num_tokens: int) -> SimExecutor:
    settings = SimSettings(
        num_blocks=int(2.5 * num_tokens / BLOCK_SIZE),
        block_size=BLOCK_SIZE,
        max_model_len=2 * num_tokens,
        max_num_requests=32,
        vocab_size=VOCAB_SIZE,
        speed=SimSpeed(factor=0.0),
    )
    return SimExecutor(settings)


if __name__ == "__main__":
    sys.exit(main())
