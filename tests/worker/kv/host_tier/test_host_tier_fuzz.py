"""The engine's random traffic with host memory: restored blocks are correct, and no block is lost."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize
from support.engine.engine_harness import make_executor, make_rig
from support.engine.rigs.machine import EngineMachine

from baton.worker.core import Request
from baton.worker.kv.host_tier.eviction.table import POLICIES


class HostMemoryMachine(EngineMachine):
    """Small pools, so that everything is evicted, over host memories of all sizes."""

    @initialize(
        depth=st.integers(1, 3),
        num_blocks=st.integers(14, 30),
        budget=st.sampled_from([4, 9, 32]),
        num_rows=st.integers(1, 4),
        num_host_blocks=st.integers(1, 60),
        staging=st.integers(1, 30),
        policy=st.sampled_from(sorted(POLICIES)),
    )
    def start(
        self, depth: int, num_blocks: int, budget: int, num_rows: int, num_host_blocks: int, staging: int, policy: str
    ) -> None:
        executor = make_executor(
            depth=depth, num_blocks=num_blocks, num_host_blocks=num_host_blocks, host_staging_blocks=staging
        )
        self.rig = make_rig(
            executor,
            max_num_batched_tokens=budget,
            max_num_requests=num_rows,
            min_host_hit_tokens=0,
            host_eviction_policy=policy,
        )
        self.engine = self.rig.engine
        self.requests: list[Request] = []
        self.expected: dict[str, list[int]] = {}
        self.accepted: set[str] = set()


HostMemoryMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestHostMemoryUnderRandomTraffic = HostMemoryMachine.TestCase
