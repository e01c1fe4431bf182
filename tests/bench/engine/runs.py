"""Runs workloads on an engine without gRPC, made from a worker's configuration, and measures the time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from bench.engine.expert_hits import ExpertHits, watched
from bench.engine.kernel_profile import ProfiledSteps, profiled
from bench.engine.sampling import GREEDY, SAMPLINGS
from bench.engine.start_log import start_said
from bench.engine.workloads import Workload

from baton.services.process.garbage import frozen_heap
from baton.worker.config import WorkerConfig
from baton.worker.core import FinishReason, Request, SamplingParams, StopConditions
from baton.worker.engine.engine import Engine
from baton.worker.executors.device_limits import with_device_limits
from baton.worker.executors.factory import make_executor
from baton.worker.process.step_trace import StepTrace, TracedExecutor
from baton.worker.requests.outputs import StepOutputs
from baton.worker.scheduling.settings import EngineSettings

_NAMESPACE = b"baton bench     "
_FIRST_TOKEN_ID = 5  # lower ones are special in most vocabularies
_WARM_UP_OUTPUT = 8  # tokens
_PROFILED_STEPS = 8  # of each kind

Say = Callable[[str], None]


class RunFailed(Exception):
    """A workload was not completed. The message is for the user."""


@dataclass(frozen=True, slots=True)
class Run:
    """One pass over a workload, from the first submit to the last token."""

    seconds: float
    num_steps: int
    num_cached_tokens: int
    num_preemptions: int
    step_seconds: float  # of the device, as reported by the executor


@dataclass(frozen=True, slots=True)
class RowResult:
    """The passes of one workload."""

    model: str
    workload: Workload
    sampling: str  # of SAMPLINGS
    runs: tuple[Run, ...]

    @property
    def median(self) -> Run:
        """The pass with the median time; the slower one of two."""
        return sorted(self.runs, key=lambda run: run.seconds)[len(self.runs) // 2]

    @property
    def seconds(self) -> float:
        """Returns the median time of the passes."""
        return statistics.median(run.seconds for run in self.runs)


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run on one model."""

    config: WorkerConfig
    workloads: tuple[Workload, ...]
    samplings: tuple[str, ...]  # of SAMPLINGS: each workload is run with each
    repeat: int
    num_warm_up: int  # requests before each row's first pass
    warm_prefix: bool  # cache shared tokens before the timed passes
    timeout: float  # seconds, for each pass
    seed: int
    profile: bool = False  # one more pass, of which some steps are profiled


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results of a plan."""

    rows: tuple[RowResult, ...]
    start_seconds: float  # until the engine accepts requests
    num_blocks: int
    expert_hits: str  # of a model with experts
    profiles: tuple[ProfiledSteps, ...] = ()


def run_plan(plan: Plan, say: Say) -> Outcome:
    """Creates the engine and runs every workload. Raises ServiceError or RunFailed."""
    config = plan.config
    with watched(config.executor) as hits:
        return _run_plan(plan, say, hits)


def _run_plan(plan: Plan, say: Say, hits: ExpertHits) -> Outcome:
    config, began = with_device_limits(plan.config), time.perf_counter()
    with start_said(say):
        executor = make_executor(config)
    try:
        settings = EngineSettings(
            max_num_requests=config.max_num_requests,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_queue_depth=config.max_queue,
            cache_outputs=not config.batch_invariant,
        )
        trace = StepTrace(config.trace_steps) if config.trace_steps else None
        engine = Engine(executor if trace is None else TracedExecutor(executor, trace), settings, epoch=time.time_ns())
        step = engine.step if trace is None else partial(trace.step, engine.step)
        start_seconds = time.perf_counter() - began
        say(f"{config.model}: ready after {start_seconds:.1f} s, {executor.num_blocks} blocks")
        bench = _EngineBench(engine, step, executor.model.vocab_size, plan, say, hits)
        rows = tuple(row for workload in plan.workloads for row in bench.rows(workload))
        if trace is not None:
            trace.close()
        shown = str(hits) if hits.counts else ""
        return Outcome(rows, start_seconds, executor.num_blocks, shown, tuple(bench.profiles))
    finally:
        executor.close()


class _EngineBench:
    """Passes over one engine. Each has new prompts, so that none finds those of another in the cache."""

    def __init__(
        self,
        engine: Engine,
        step: Callable[[], StepOutputs],
        vocab_size: int,
        plan: Plan,
        say: Say,
        hits: ExpertHits,
    ) -> None:
        self._hits = hits
        self._engine = engine
        self._step = step
        self._plan = plan
        self._say = say
        self._vocab_size = vocab_size
        self._random = np.random.default_rng(plan.seed)
        self._num_submitted = 0
        self.profiles: list[ProfiledSteps] = []

    def rows(self, workload: Workload) -> list[RowResult]:
        """Runs warm-ups, then the timed passes. Samplings take turns, so that all see the same clock rates."""
        num_warm_up = min(self._plan.num_warm_up, workload.num_requests)
        samplings = self._plan.samplings
        if num_warm_up:
            output = min(_WARM_UP_OUTPUT, workload.num_output)
            self._hits.counting = True
            for name in samplings:
                self._pass(Workload(num_warm_up, workload.num_own, output, workload.num_shared), name)
        self._hits.counting = False
        runs: dict[str, list[Run]] = {name: [] for name in samplings}
        model = self._plan.config.model
        for number in range(self._plan.repeat):
            for name in samplings:
                run = self._pass(workload, name)
                runs[name].append(run)
                self._say(f"{model}: {workload}, {name}: {run.seconds:.3f} s ({number + 1}/{self._plan.repeat})")
        if self._plan.profile:
            self.profiles += self._profile(workload, samplings[0])
        return [RowResult(model, workload, name, tuple(passes)) for name, passes in runs.items()]

    def _profile(self, workload: Workload, sampling: str) -> Iterator[ProfiledSteps]:
        """Profiles the first steps of a pass, which compute prompts, and some in which all requests decode."""
        engine, made = self._engine, SAMPLINGS[sampling]
        prefix = self._tokens(workload.num_shared)
        requests = [
            self._request(prefix + self._tokens(own), output, made(number))
            for number, (own, output) in enumerate(workload.lengths)
        ]
        for request in requests:
            engine.submit(request)

        def steps(kind: str) -> ProfiledSteps:
            count, seconds, kernels = profiled(
                self._step, lambda: engine.counters().num_steps, _PROFILED_STEPS, engine.has_work
            )
            return ProfiledSteps(f"{self._plan.config.model}, {workload}", kind, count, seconds, kernels)

        yield steps("first steps")
        while engine.has_work() and not all(len(one.token_ids) > one.num_prompt_tokens for one in requests):
            self._step()
        if engine.has_work():
            yield steps(f"decode of up to {len(requests)} requests")
        while engine.has_work():
            self._step()

    def _pass(self, workload: Workload, sampling: str) -> Run:
        prefix = self._tokens(workload.num_shared)
        if prefix and self._plan.warm_prefix:
            self._drive([self._request(prefix + self._tokens(1), 1, GREEDY)])
        made = SAMPLINGS[sampling]
        requests = [
            self._request(prefix + self._tokens(own), output, made(number))
            for number, (own, output) in enumerate(workload.lengths)
        ]
        before = self._engine.counters()
        seconds = self._drive(requests)
        after = self._engine.counters()
        return Run(
            seconds,
            after.num_steps - before.num_steps,
            after.num_cached_tokens - before.num_cached_tokens,
            after.num_preemptions - before.num_preemptions,
            after.step_seconds - before.step_seconds,
        )

    def _drive(self, requests: Sequence[Request]) -> float:
        """Returns the seconds until the last token. Waits for a superfluous last step, but does not count it."""
        engine = self._engine
        left = len(requests)
        with frozen_heap():
            began = time.perf_counter()
            for request in requests:
                engine.submit(request)
            while left:
                outputs = self._step()
                if outputs.finishes or outputs.failures:
                    left -= _num_finished(outputs)
                if time.perf_counter() - began > self._plan.timeout:
                    raise RunFailed(f"{left} of {len(requests)} requests unfinished after {self._plan.timeout:g} s")
            seconds = time.perf_counter() - began
        while engine.has_work():
            self._step()
        return seconds

    def _tokens(self, count: int) -> list[int]:
        token_ids: list[int] = self._random.integers(_FIRST_TOKEN_ID, self._vocab_size, size=count).tolist()
        return token_ids

    def _request(self, prompt: list[int], num_output: int, sampling: SamplingParams) -> Request:
        self._num_submitted += 1
        return Request(
            request_id=f"bench-{self._num_submitted}",
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            sampling=sampling,
            stop=StopConditions(max_tokens=num_output),
            cache_namespace=_NAMESPACE,
        )


def _num_finished(outputs: StepOutputs) -> int:
    if outputs.failures:
        raise RunFailed(f"a request failed: {outputs.failures[0].error.message}")
    for finish in outputs.finishes:
        request = finish.request
        num_output = len(request.token_ids) - request.num_prompt_tokens
        if finish.reason is not FinishReason.LENGTH or num_output != request.stop.max_tokens:
            raise RunFailed(
                f"a request ended with {num_output} of {request.stop.max_tokens} tokens ({finish.reason.value})"
            )
    return len(outputs.finishes)
