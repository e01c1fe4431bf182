"""Passes of an engine whose requests have random adapters, and the loads of adapters beside decodes."""

from __future__ import annotations

import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
from bench.engine.start_log import start_said
from bench.engine.workloads import Workload

from baton.rpc.errors import InternalError
from baton.services.process.garbage import frozen_heap
from baton.worker.adapters.adapter import Adapter, PartWeights, packed_adapter
from baton.worker.adapters.memory import AdapterMemory, HostAdapter
from baton.worker.adapters.tensors import TensorAdapters
from baton.worker.config import WorkerConfig
from baton.worker.core import AdapterRef, Request, SamplingParams, StopConditions
from baton.worker.engine.adapters.loads import ThreadLoads
from baton.worker.engine.adapters.pool import AdapterPool
from baton.worker.engine.engine import Engine
from baton.worker.executors.device_limits import with_device_limits
from baton.worker.executors.factory import make_executor
from baton.worker.requests.state import RequestState
from baton.worker.scheduling.settings import EngineSettings

_ROW = re.compile(r"(none:|load:)?(\d+)x(\d+(?:\+\d+)*)")
_NAMESPACE = b"baton adapters  "
_WARM_UP_OUTPUT = 8  # tokens
_WINDOW_STEPS = 40  # after an arrival, in which the ITL of others counts
STEPS_OF_LOAD = 60  # that an arrival takes at most, usually
_IDLE_SECONDS = 1e-4
_SMALL = 1e-3  # scale of the updates: they change hardly a token


@dataclass(frozen=True, slots=True)
class RowOf:
    """What the requests of a row use."""

    text: str
    num_adapters: int = 0  # the worker has room for so many
    ranks: tuple[int, ...] = ()  # of adapters 0, 1, ..., in turns
    used: bool = False
    loads: bool = False  # adapters are loaded beside decodes

    @classmethod
    def parse(cls, text: str) -> RowOf:
        """Parses base, 16x16, 64x8+16+64, none:16x16 or load:16x16. Raises ValueError."""
        if text == "base":
            return cls(text)
        match = _ROW.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is no row: write base, 16x16, 64x8+16+64, none:16x16 or load:16x16")
        ranks = tuple(int(rank) for rank in match[3].split("+"))
        return cls(text, int(match[2]), ranks, match[1] is None, match[1] == "load:")


@dataclass(frozen=True, slots=True)
class AdapterPlan:
    """What to run on one worker."""

    config: WorkerConfig
    rows: tuple[RowOf, ...]
    workload: Workload
    repeat: int
    num_loads: int
    timeout: float  # seconds, for each pass


@dataclass(frozen=True, slots=True)
class RowRun:
    """The passes of a row."""

    row: str
    runs: tuple[float, ...]  # seconds from the first submit to the last token
    num_blocks: int

    @property
    def seconds(self) -> float:
        """Returns the median time of a pass, in seconds."""
        return statistics.median(self.runs)

    @property
    def summary(self) -> str:
        """Returns a line of progress."""
        return f"{self.row}: {', '.join(f'{seconds:.3f}' for seconds in self.runs)} s, {self.num_blocks} KV blocks"


@dataclass(slots=True)
class Arrivals:
    """Requests that arrive while others decode."""

    ttft: list[float] = field(default_factory=list)  # seconds to the first token of each
    itl: list[float] = field(default_factory=list)  # seconds between tokens of the others, after each arrival

    @property
    def itl_p50(self) -> float:
        """Returns the median time between tokens of the requests that decode, in seconds."""
        return float(np.percentile(self.itl, 50))

    @property
    def itl_p99(self) -> float:
        """99th percentile of the ITL."""
        return float(np.percentile(self.itl, 99))


@dataclass(frozen=True, slots=True)
class LoadRun:
    """Arrivals with adapters that are in host memory only, and without adapters."""

    row: str
    loaded: Arrivals
    plain: Arrivals
    num_others: int

    @property
    def summary(self) -> str:
        """What loads cost the requests that bring them, and others."""
        ttft, itl = statistics.median(self.loaded.ttft), self.loaded.itl_p99
        plain, usual = statistics.median(self.plain.ttft), self.plain.itl_p99
        return (
            f"{self.row}: first token after {1000 * ttft:.1f} ms with a load, {1000 * plain:.1f} ms without an adapter "
            f"(+{1000 * (ttft - plain):.1f}); ITL p99 of {self.num_others} other requests {1000 * itl:.2f} and "
            f"{1000 * usual:.2f} ms ({itl / usual:.2f}x), median {1000 * self.loaded.itl_p50:.2f} and "
            f"{1000 * self.plain.itl_p50:.2f} ms"
        )


class RandomAdapters:
    """Implements AdapterMemory: paths are ranks and numbers, as 16:3. Adapters of a rank share host memory."""

    def __init__(self, memory: TensorAdapters, dtype: torch.dtype) -> None:
        self._memory = memory
        self._dtype = dtype
        self._made: dict[int, Adapter] = {}
        self.num_slots = memory.num_slots

    def digest(self, path: str) -> bytes:
        return path.encode().ljust(16)

    def read(self, path: str) -> HostAdapter:
        rank = int(path.partition(":")[0])
        if rank not in self._made:
            self._made[rank] = self._make(rank)
        return replace(self._made[rank], digest=self.digest(path))

    def write(self, slot: int, adapter: HostAdapter) -> None:
        self._memory.write(slot, adapter)

    def _make(self, rank: int) -> Adapter:
        """Returns an adapter of all linears of the layers."""
        values = torch.empty(1 << 20).normal_(0.0, _SMALL).to(self._dtype)

        def random(height: int, width: int) -> torch.Tensor:
            return values.repeat(-(-height * width // len(values)))[: height * width].view(height, width)

        weights = {
            site.name: {
                index: PartWeights(random(rank, site.in_features), random(part.rows, rank), 1.0)
                for index, part in enumerate(site.parts)
            }
            for site in self._memory.base.sites
            if not site.is_embedding and not site.num_experts and site.name != self._memory.base.head
        }
        return packed_adapter(b"", rank, weights, self._memory.base, self._dtype)


def run_rows(plan: AdapterPlan) -> list[RowRun | LoadRun]:
    """Starts the worker's engine and runs its rows. Raises ServiceError, or TimeoutError for a pass that hangs."""
    config = with_device_limits(plan.config)
    with start_said(_say):
        executor = make_executor(config)
    loads = ThreadLoads()
    memory = None
    try:
        if executor.adapters is not None:
            tensors = cast(TensorAdapters, executor.adapters)
            memory = RandomAdapters(tensors, tensors.dtype)
        bench = _Bench(config, executor, memory, loads, plan)
        found: list[RowRun | LoadRun] = []
        for row in plan.rows:
            found.append(bench.load_row(row) if row.loads else bench.row(row))
            _say(found[-1].summary)
        return found
    finally:
        loads.close()
        executor.close()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class _Bench:
    def __init__(
        self, config: WorkerConfig, executor: Any, memory: AdapterMemory | None, loads: ThreadLoads, plan: AdapterPlan
    ) -> None:
        pool: AdapterPool[RequestState] | None = None
        if memory is not None:
            pool = AdapterPool(memory, 1 << 16, loads, time.monotonic)
        settings = EngineSettings(
            max_num_requests=config.max_num_requests,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_queue_depth=config.max_queue,
        )
        self._engine = Engine(executor, settings, epoch=time.time_ns(), adapters=pool)
        self._plan = plan
        self._num_blocks: int = executor.num_blocks
        self._vocab_size: int = executor.model.vocab_size
        self._random = np.random.default_rng(0)
        self._num_submitted = 0
        self._num_loaded = 0

    def row(self, row: RowOf) -> RowRun:
        """Runs the row's passes, after one that loads the adapters."""
        workload = self._plan.workload
        self._pass(replace(workload, num_output=min(_WARM_UP_OUTPUT, workload.num_output)), row)
        runs = tuple(self._pass(workload, row) for _ in range(self._plan.repeat))
        return RowRun(row.text, runs, self._num_blocks)

    def load_row(self, row: RowOf) -> LoadRun:
        """Has requests arrive, in turns with a new adapter and without, while half of the workload's decode."""
        workload = self._plan.workload
        longest = self._engine.max_model_len - workload.num_own
        others = [self._request(workload.num_own, longest) for _ in range(workload.num_requests // 2)]
        for other in others:
            self._engine.submit(other)
        self._until(lambda: all(len(other.token_ids) > other.num_prompt_tokens + 4 for other in others))
        loaded, plain = Arrivals(), Arrivals()
        for number in range(2 * self._plan.num_loads + 2):
            adapter = self._new_adapter(row.ranks[0]) if number % 2 else None
            seen = self._arrival(self._request(64, 2, adapter))
            if number > 1:  # the first of each kind warms up
                into = loaded if number % 2 else plain
                into.ttft.append(seen.ttft[0])
                into.itl += seen.itl
        for other in others:
            self._engine.abort(other.request_id)
        self._until(lambda: not self._engine.has_work())
        return LoadRun(row.text, loaded, plain, len(others))

    def _arrival(self, request: Request) -> Arrivals:
        """Submits a request. Returns its TTFT, and the seconds between the steps of that time and some after it."""
        seen = Arrivals()
        last = began = time.perf_counter()
        self._engine.submit(request)
        while len(seen.itl) < _WINDOW_STEPS or not seen.ttft:
            outputs = self._engine.step()
            now = time.perf_counter()
            if len(outputs.token_ids):
                seen.itl.append(now - last)
                last = now
            if not seen.ttft and len(request.token_ids) > request.num_prompt_tokens:
                seen.ttft.append(now - began)
            self._check(now - began)
            if not self._engine.has_work():
                raise TimeoutError(f"the other requests ended before {_WINDOW_STEPS} steps after an arrival")
        seen.itl.pop(0)  # its beginning was before the submit
        return seen

    def _new_adapter(self, rank: int) -> AdapterRef:
        """Returns an adapter that no request has used. Its rank is in host memory after the first one."""
        self._num_loaded += 1
        return _ref(f"{rank}:new-{self._num_loaded}")

    def _pass(self, workload: Workload, row: RowOf) -> float:
        """Returns the seconds from the first submit to the last token."""
        requests = []
        for number in range(workload.num_requests):
            place = number % row.num_adapters if row.used else 0
            adapter = _ref(f"{row.ranks[place % len(row.ranks)]}:{place}") if row.used else None
            requests.append(self._request(workload.num_own, workload.num_output, adapter))
        with frozen_heap():
            began = time.perf_counter()
            for request in requests:
                self._engine.submit(request)
            self._until(lambda: all(_ended(request) for request in requests))
            seconds = time.perf_counter() - began
        self._until(lambda: not self._engine.has_work())
        return seconds

    def _until(self, reached: Callable[[], bool]) -> None:
        began = time.perf_counter()
        while not reached():
            outputs = self._engine.step()
            if outputs.failures:
                raise InternalError(f"a request failed: {outputs.failures[0].error.message}")
            if not outputs:
                time.sleep(_IDLE_SECONDS)  # for threads that load adapters
            self._check(time.perf_counter() - began)

    def _check(self, seconds: float) -> None:
        if seconds > self._plan.timeout:
            raise TimeoutError(f"a pass takes longer than {self._plan.timeout:g} s")

    def _request(self, num_prompt: int, num_output: int, adapter: AdapterRef | None = None) -> Request:
        self._num_submitted += 1
        prompt: Sequence[int] = self._random.integers(5, self._vocab_size, size=num_prompt).tolist()
        return Request(
            request_id=f"bench-{self._num_submitted}",
            token_ids=list(prompt),
            num_prompt_tokens=num_prompt,
            sampling=SamplingParams(temperature=0.0),
            stop=StopConditions(max_tokens=num_output),
            cache_namespace=_NAMESPACE,
            adapter=adapter,
        )


def _ref(path: str) -> AdapterRef:
    return AdapterRef(path, path, path.encode().ljust(16))


def _ended(request: Request) -> bool:
    return len(request.token_ids) - request.num_prompt_tokens >= request.stop.max_tokens
