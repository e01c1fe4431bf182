"""Runs an executor with given plans, so that it is tested without a scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from baton.worker.core import BlockId, MoreBlocks, Row, RowInit, SamplingParams, StepPlan, TokenLogprobs
from baton.worker.executors.base import Executor

GREEDY = SamplingParams(temperature=0.0)


@dataclass(eq=False)
class Running:
    """The harness's state of a request."""

    row: Row
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    block_ids: list[BlockId]
    num_computed: int = 0
    announced: bool = False
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]


class StepHarness:
    """Allocates rows and blocks in an order that leaves no block table contiguous.

    Block n of the harness is blocks of all KV groups: those from n * groups on, one in each.
    """

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.step = 0
        self._num_groups = max(1, len(executor.kv_spec.groups))
        num_blocks = executor.num_blocks // self._num_groups
        self.free_blocks = [BlockId(block) for block in np.random.default_rng(5).permutation(num_blocks)]
        self.running: list[Running] = []
        self.freed: list[Row] = []

    def in_group(self, block_ids: Sequence[BlockId], group: int) -> list[BlockId]:
        """Returns the executor's blocks in a group."""
        return [BlockId(int(block) * self._num_groups + group) for block in block_ids]

    def in_layer(self, block_ids: Sequence[BlockId], layer: int) -> list[BlockId]:
        """Returns the executor's blocks in the group of a KV layer."""
        return self.in_group(block_ids, self.executor.kv_spec.group_of(layer))

    def admit(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams = GREEDY,
        output: Sequence[int] = (),
        shared_blocks: Sequence[BlockId] = (),
    ) -> Running:
        """Admits a request. `shared_blocks` already hold its first tokens."""
        taken = {running.row for running in self.running}
        row = Row(next(row for row in range(10**6) if row not in taken))
        num_cached = len(shared_blocks) * self.executor.kv_spec.block_size
        running = Running(row, [*prompt, *output], len(prompt), sampling, list(shared_blocks), num_cached)
        self.running.append(running)
        return running

    def free(self, running: Running) -> None:
        """Ends a request. Its blocks are not reused."""
        self.running.remove(running)
        self.freed.append(running.row)

    def run_step(self, chunk: int = 10**6) -> None:
        """Computes at most `chunk` tokens of each request, and appends sampled tokens."""
        size = self.executor.kv_spec.block_size
        decodes = [one for one in self.running if one.announced and len(one.token_ids) - one.num_computed == 1]
        scheduled = [*decodes, *(one for one in self.running if one not in decodes)]
        counts = [min(chunk, len(one.token_ids) - one.num_computed) for one in scheduled]
        ends = [one.num_computed + count for one, count in zip(scheduled, counts, strict=True)]
        samples = [end == len(one.token_ids) for one, end in zip(scheduled, ends, strict=True)]
        plan = StepPlan(
            self.step,
            freed=self.freed,
            rows=np.array([one.row for one in scheduled], np.int32),
            num_scheduled_tokens=np.array(counts, np.int32),
            num_computed_tokens=np.array([one.num_computed for one in scheduled], np.int32),
            samples=np.array(samples, np.bool_),
            num_decodes=len(decodes),
        )
        for one, end in zip(scheduled, ends, strict=True):
            new = [self.free_blocks.pop() for _ in range(-(-end // size) - len(one.block_ids))]
            one.block_ids += new
            if not one.announced:
                init = RowInit(one.row, np.array(one.token_ids, np.int32), one.num_prompt_tokens, one.sampling)
                plan.admitted.append(init)
                new = one.block_ids
            if new:
                plan.new_blocks.append((one.row, self.in_group(new, 0)))
                plan.more_blocks += [
                    MoreBlocks(one.row, group, len(one.block_ids) - len(new), self.in_group(new, group))
                    for group in range(1, self._num_groups)
                ]
            one.announced = True
        self.step, self.freed = self.step + 1, []
        self.executor.launch(plan)
        result = self.executor.collect()
        assert result.step == plan.step
        sampling = [one for one, sampled in zip(scheduled, samples, strict=True) if sampled]
        for index, (one, token_id) in enumerate(zip(sampling, result.token_ids.tolist(), strict=True)):
            one.token_ids.append(token_id)
            if index in result.logprobs:
                one.logprobs.append(result.logprobs[index])
        for one, end in zip(scheduled, ends, strict=True):
            one.num_computed = end

    def run(self, count: int, chunk: int = 10**6) -> None:
        """Steps until every request has at least `count` output tokens. Requests that have them end."""
        while any(len(one.output) < count for one in self.running):
            self.run_step(chunk)
            for one in [one for one in self.running if len(one.output) >= count]:
                self.free(one)
