"""Runs an executor with given plans, so that it is tested without a scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from baton.worker.core import BlockId, MoreBlocks, Row, RowInit, SamplingParams, StepPlan, TokenLogprobs
from baton.worker.executors.base import Executor
from baton.worker.kv_spec import KvKind

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
    adapter_slot: int = -1
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]


class StepHarness:
    """Allocates rows and blocks in an order that leaves no block table contiguous.

    Block n of the harness is blocks of all KV groups: one in each, and as many as a state takes in groups of states.
    Chunks of models with states end where a shared prefix may.
    """

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.step = 0
        spec = executor.kv_spec
        self._states = [index for index, group in enumerate(spec.groups) if group.kind is KvKind.STATE]
        self._pages = [spec.pages_each(group) for group in spec.groups] or [1]
        num_blocks = executor.num_blocks // sum(self._pages)
        self.free_blocks = [BlockId(block) for block in np.random.default_rng(5).permutation(num_blocks)]
        self.running: list[Running] = []
        self.freed: list[Row] = []

    def in_group(self, block_ids: Sequence[BlockId], group: int) -> list[BlockId]:
        """Returns the executor's blocks in a group."""
        each, first = sum(self._pages), sum(self._pages[:group])
        return [BlockId(int(block) * each + first + page) for block in block_ids for page in range(self._pages[group])]

    def in_layer(self, block_ids: Sequence[BlockId], layer: int) -> list[BlockId]:
        """Returns the executor's blocks in the group of a KV layer."""
        return self.in_group(block_ids, self.executor.kv_spec.group_of(layer))

    def admit(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams = GREEDY,
        output: Sequence[int] = (),
        shared_blocks: Sequence[BlockId] = (),
        adapter_slot: int = -1,
    ) -> Running:
        """Admits a request. `shared_blocks` already hold its first tokens."""
        taken = {running.row for running in self.running}
        row = Row(next(row for row in range(10**6) if row not in taken))
        num_cached = len(shared_blocks) * self.executor.kv_spec.block_size
        running = Running(row, [*prompt, *output], len(prompt), sampling, list(shared_blocks), num_cached)
        running.adapter_slot = adapter_slot
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
        counts = [self._count(one, chunk) for one in scheduled]
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
                init.adapter_slot = one.adapter_slot
                plan.admitted.append(init)
                new = one.block_ids
            if new:
                plan.new_blocks.append((one.row, self.in_group(new, 0)))
                plan.more_blocks += [
                    MoreBlocks(one.row, group, len(one.block_ids) - len(new), self.in_group(new, group))
                    for group in range(1, len(self._pages))
                    if group not in self._states
                ]
            plan.more_blocks += [
                MoreBlocks(one.row, group, number, self.in_group([one.block_ids[number]], group))
                for group in self._states
                for number in sorted({(max(one.num_computed, 1) - 1) // size, (end - 1) // size})
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
        for index, (one, end) in enumerate(zip(scheduled, ends, strict=True)):
            one.num_computed = end
            if index in result.prompt_logprobs:
                one.prompt_logprobs += result.prompt_logprobs[index][1]

    def _count(self, one: Running, chunk: int) -> int:
        """Returns the tokens of a request's next step."""
        size, known = self.executor.kv_spec.block_size, len(one.token_ids)
        end = min(one.num_computed + chunk, known)
        last = (known - 1) // size * size
        if self._states and one.num_computed < last < end:
            end = last
        return end - one.num_computed

    def run(self, count: int, chunk: int = 10**6) -> None:
        """Steps until every request has at least `count` output tokens. Requests that have them end."""
        while any(len(one.output) < count for one in self.running):
            self.run_step(chunk)
            for one in [one for one in self.running if len(one.output) >= count]:
                self.free(one)
