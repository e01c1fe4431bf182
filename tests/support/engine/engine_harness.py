"""Engines on the simulated device, and naive results to compare them with."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from baton.rpc.block_hash import cache_namespace
from baton.rpc.errors import ServiceError
from baton.worker.core import BlockId, FinishReason, Request, SamplingParams, StopConditions
from baton.worker.engine.engine import Engine
from baton.worker.executors.sim.executor import SimExecutor, SimSettings, SimSpeed
from baton.worker.executors.sim.kv import SimKv
from baton.worker.requests.outputs import Finish, StepOutputs
from baton.worker.scheduling.settings import EngineSettings

BLOCK_SIZE = 4
NAMESPACE = cache_namespace(bytes(16), BLOCK_SIZE)
GREEDY = SamplingParams(temperature=0.0)
DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3])
_NUMBERS = itertools.count()


class Clock:
    """Virtual time that advances only by sleeping."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def make_executor(clock: Clock | None = None, **values: object) -> SimExecutor:
    defaults: dict[str, object] = {
        "num_blocks": 256,
        "block_size": BLOCK_SIZE,
        "max_num_requests": 32,
        "max_model_len": 512,
        "speed": SimSpeed(factor=1.0 if clock else 0.0),
    }
    settings = SimSettings(**{**defaults, **values})  # type: ignore[arg-type]
    return SimExecutor(settings, clock, clock.sleep) if clock else SimExecutor(settings)


def make_request(prompt: Sequence[int], max_tokens: int = 8, **values: object) -> Request:
    stop_keys = ("min_tokens", "eos_token_ids", "stop_token_ids")
    stop = StopConditions(max_tokens, **{key: values.pop(key) for key in stop_keys if key in values})  # type: ignore[arg-type]
    defaults: dict[str, object] = {
        "request_id": f"r{next(_NUMBERS)}",
        "num_prompt_tokens": len(prompt),
        "sampling": GREEDY,
        "cache_namespace": NAMESPACE,
    }
    return Request(token_ids=list(prompt), stop=stop, **{**defaults, **values})  # type: ignore[arg-type]


def prompt_of(length: int, salt: int = 0) -> list[int]:
    """Returns a prompt that shares no prefix with those of other salts."""
    return [5 + (salt * 7919 + i * 104729 + (i * i) % 97) % 4000 for i in range(length)]


@dataclass
class Collected:
    """The collected outputs of all requests."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    finishes: dict[str, Finish] = field(default_factory=dict)
    failures: dict[str, ServiceError] = field(default_factory=dict)
    num_wanted: dict[str, int] = field(default_factory=dict)
    started: list[str] = field(default_factory=list)
    first_tokens: dict[str, int] = field(default_factory=dict)
    progress: dict[str, list[int]] = field(default_factory=dict)

    def add(self, outputs: StepOutputs) -> StepOutputs:
        for request, token_id, _ in outputs.tokens():
            assert request.request_id not in self.failures
            assert request.request_id not in self.finishes, "a token after the finish"
            self.tokens.setdefault(request.request_id, []).append(token_id)
        for finish in outputs.finishes:
            assert finish.request_id not in self.finishes, "finished twice"
            self.finishes[finish.request_id] = finish
        for failure in outputs.failures:
            assert failure.request_id not in self.failures, "failed twice"
            assert failure.request_id not in self.finishes, "failed after its finish"
            self.failures[failure.request_id] = failure.error
        for wanted in outputs.prefill_wanted:
            assert wanted.request.request_id not in self.num_wanted, "wanted twice"
            self.num_wanted[wanted.request.request_id] = wanted.num_cached_tokens
        for started in outputs.prefill_started:
            self.started.append(started.request.request_id)
        for request, count in outputs.prefill_progress:
            self.progress.setdefault(request.request_id, []).append(count)
        for first in outputs.first_tokens:
            self.first_tokens[first.request.request_id] = first.token_id
        return outputs


@dataclass
class Rig:
    """An engine, its device and its outputs."""

    engine: Engine
    executor: SimExecutor
    seen: Collected = field(default_factory=Collected)

    def submit(self, *requests: Request) -> None:
        for request in requests:
            self.engine.submit(request)

    def step(self) -> StepOutputs:
        return self.seen.add(self.engine.step())

    def drain(self, limit: int = 3000) -> None:
        """Steps until no request can run."""
        for _ in range(limit):
            if not self.engine.has_work():
                return
            self.step()
        raise AssertionError(f"still work after {limit} steps: {self.engine.load()}")

    def run(self, *requests: Request) -> list[list[int]]:
        self.submit(*requests)
        self.drain()
        return [self.seen.tokens.get(request.request_id, []) for request in requests]

    def assert_nothing_held(self) -> None:
        audit = self.engine.audit()
        assert (audit.num_held_blocks, audit.num_leased_blocks) == (0, 0)


def make_rig(executor: SimExecutor | None = None, clock: Clock | None = None, **values: object) -> Rig:
    executor = executor or make_executor(clock)
    defaults: dict[str, object] = {"max_num_requests": 32, "max_num_batched_tokens": 64, "min_remote_prefill_tokens": 4}
    settings = EngineSettings(**{**defaults, **values})  # type: ignore[arg-type]
    return Rig(Engine(executor, settings, 1, clock) if clock else Engine(executor, settings, 1), executor)


@functools.cache
def _alone(prompt: tuple[int, ...], num_tokens: int, temperature: float, seed: int) -> list[int]:
    most = max(512, len(prompt) + num_tokens)
    executor = make_executor(num_blocks=-(-most // BLOCK_SIZE), max_model_len=most)
    rig = make_rig(executor, prefix_caching=False, max_num_batched_tokens=most)
    sampling = SamplingParams(temperature=temperature, seed=seed)
    return rig.run(make_request(prompt, num_tokens, sampling=sampling))[0]


def expected_tokens(prompt: Sequence[int], num_tokens: int, temperature: float = 0.0, seed: int = 0) -> list[int]:
    """Returns the output of a request that runs alone on a new device, in one chunk, without cached blocks."""
    return _alone(tuple(prompt), num_tokens, temperature, seed)


def expected_for(request: Request) -> list[int]:
    prompt = request.token_ids[: request.num_prompt_tokens]
    return expected_tokens(prompt, request.stop.max_tokens, request.sampling.temperature, request.sampling.seed)


def check_all(rig: Rig, requests: Sequence[Request]) -> None:
    """Asserts that each request has the tokens that it gets alone, and that no resources are held."""
    for request in requests:
        assert rig.seen.tokens[request.request_id] == expected_for(request)
        assert rig.seen.finishes[request.request_id].reason is FinishReason.LENGTH
    rig.assert_nothing_held()


def write_remote_kv(executor: SimExecutor, token_ids: Sequence[int], first_block: int, leased: list[BlockId]) -> None:
    """Writes the prompt's KV from first_block on to the leased blocks, as a prefill worker's push does."""
    num_blocks = -(-len(token_ids) // BLOCK_SIZE)
    kv = SimKv(executor.kv_spec.num_layers, num_blocks, BLOCK_SIZE)
    kv.prefill(np.arange(num_blocks, dtype=np.int32), 0, np.array(token_ids, np.uint64))
    for layer in range(executor.kv_spec.num_layers):
        words = kv.words[layer].reshape(num_blocks, BLOCK_SIZE)[first_block:]
        executor.write_blocks(layer, leased, memoryview(words.tobytes()))


def submit_remote(rig: Rig, prompt: list[int], max_tokens: int = 8, **values: object) -> Request:
    request = make_request(prompt, max_tokens, remote_prefill=True, **values)
    rig.submit(request)
    rig.step()
    assert request.request_id in rig.seen.num_wanted
    return request


def receive(rig: Rig, request: Request) -> None:
    """Leases blocks and pushes KV, without finish_transfer."""
    first_block = rig.seen.num_wanted[request.request_id] // BLOCK_SIZE
    leased = rig.engine.reserve_blocks(request.request_id)
    assert leased is not None
    write_remote_kv(rig.executor, request.token_ids, first_block, leased)
