"""A group of ranks: followers in separate processes get every plan, and sample the leader's tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from support.engine.rigs.rank_process import RankProcess, digest_of, starter
from support.engine.tiny_models import make_model, prompts

from baton.rpc.errors import InternalError, NoCapacity, Unsupported
from baton.worker.config import WorkerConfig
from baton.worker.core import Request, SamplingParams, StepPlan, StepResult, StopConditions
from baton.worker.engine.engine import Engine
from baton.worker.executors.base import DeviceLost
from baton.worker.executors.cpu.executor import CpuExecutor
from baton.worker.executors.factory import make_executor
from baton.worker.executors.ranks import RankGroup, start_ranks
from baton.worker.scheduling.settings import EngineSettings

ROWS = 4


class Leader(CpuExecutor):
    """Keeps the digests of its steps, and fails at a given call."""

    def __init__(self, config: WorkerConfig) -> None:
        super().__init__(config)
        self.digests: list[bytes] = []
        self.error: Exception | None = None
        self.closed = False

    def launch(self, plan: StepPlan) -> None:
        if self.error is not None:
            raise self.error
        super().launch(plan)

    def collect(self) -> StepResult:
        result = super().collect()
        self.digests.append(digest_of(result))
        return result

    def close(self) -> None:
        self.closed = True
        super().close()


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> WorkerConfig:
    folder = tmp_path_factory.mktemp("llama")
    make_model("llama3-rope", folder)
    return WorkerConfig(
        model=str(folder), executor="cpu", threads=1, block_size=8, num_blocks=24, max_num_requests=ROWS
    )


@pytest.fixture
def start(config: WorkerConfig) -> Iterator[Callable[[int], tuple[Leader, list[RankProcess], RankGroup]]]:
    with ExitStack() as cleanup:

        def start_group(size: int) -> tuple[Leader, list[RankProcess], RankGroup]:
            leader, ranks = Leader(config), [RankProcess(rank, config) for rank in range(1, size)]
            group = start_ranks(lambda: leader, [lambda rank=rank: rank for rank in ranks])
            cleanup.callback(group.close)
            return leader, ranks, group

        yield start_group


def engine_over(group: RankGroup) -> Engine:
    return Engine(group, EngineSettings(max_num_requests=ROWS, max_num_batched_tokens=32), epoch=1)


def request_of(name: str, prompt: list[int], num_tokens: int, seed: int = 0) -> Request:
    sampling = SamplingParams(temperature=0.8, top_k=20, seed=seed, presence_penalty=0.5)
    return Request(name, list(prompt), len(prompt), sampling, StopConditions(max_tokens=num_tokens), bytes(16))


def submit_all(engine: Engine, num_tokens: int = 24) -> int:
    for index, prompt in enumerate(prompts(6, 60)):
        engine.submit(request_of(str(index), prompt, num_tokens, index))
    return 6


def step_on(engine: Engine) -> None:
    while True:
        engine.step()


def test_followers_sample_the_leaders_tokens_from_plans_only(start):
    """Through chunks, full batches and preemptions: blocks are too few for all requests."""
    leader, (follower, other), group = start(3)
    assert group.size == 3
    engine = engine_over(group)
    left = submit_all(engine)
    while left:
        outputs = engine.step()
        assert not outputs.failures
        left -= len(outputs.finishes)
    assert engine.counters().num_preemptions > 0
    for rank in (follower, other):
        rank.wait_done(len(leader.digests))
        assert rank.digests == leader.digests


def test_a_rank_that_dies_is_lost_at_once(start):
    """The quickest of a few: a busy machine may be late."""
    seconds: list[float] = []
    while len(seconds) < 3 and min(seconds, default=1.0) >= 0.3:
        _, (follower,), group = start(2)
        engine = engine_over(group)
        submit_all(engine)
        engine.step()
        killed = time.monotonic()
        follower.process.kill()
        with pytest.raises(DeviceLost, match="rank 1"):
            step_on(engine)
        seconds.append(time.monotonic() - killed)
    assert min(seconds) < 0.3


def test_a_step_that_only_the_leader_fails_loses_the_group(start):
    leader, _, group = start(2)
    engine = engine_over(group)
    submit_all(engine)
    leader.error = NoCapacity("out of memory")
    with pytest.raises(DeviceLost, match=r"rank 0 of 2.*out of memory"):
        engine.step()


def test_a_step_that_one_rank_fails_alone_fails_its_requests(start):
    leader, _, group = start(1)
    engine = engine_over(group)
    submit_all(engine)
    leader.error = NoCapacity("out of memory")
    failures = engine.step().failures
    assert failures
    assert all(isinstance(failure.error, NoCapacity) for failure in failures)
    leader.error = None
    assert not engine.step().failures


def test_a_rank_that_cannot_start_ends_the_others_and_is_named(config, tmp_path: Path):
    leaders: list[Leader] = []
    good = RankProcess(1, config)

    def make_leader() -> Leader:
        leaders.append(Leader(config))
        return leaders[0]

    with pytest.raises(InternalError, match=r"rank 2 cannot start: .*config\.json"):
        start_ranks(make_leader, [lambda: good, starter(2, replace(config, model=str(tmp_path)))])
    assert leaders[0].closed
    assert not good.process.is_alive()


def test_weights_and_memory_of_several_ranks_stay_as_they_are(start):
    _, _, group = start(2)
    for change in (lambda: group.read_weights(""), lambda: group.sleep(1)):
        with pytest.raises(Unsupported, match="2 ranks"):
            change()


def test_host_memory_needs_one_rank(config):
    follower = RankProcess(1, config)
    with pytest.raises(Unsupported, match="host memory"):
        start_ranks(lambda: Leader(replace(config, host_cache_gb=0.01)), [lambda: follower])
    assert not follower.process.is_alive()


def test_every_executor_is_a_group_of_one_rank(config):
    for name in ("cpu", "sim"):
        group = make_executor(replace(config, executor=name))
        assert isinstance(group, RankGroup)
        assert group.size == 1
        new = group.read_weights("")
        group.use_weights(new)
        assert group.kv_spec.model_digest == group.model.digest == new.digest
        group.close()
