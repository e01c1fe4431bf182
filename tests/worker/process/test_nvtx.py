"""NVTX ranges around steps: opened and closed in order, also where a step fails."""

from types import SimpleNamespace

import pytest

from baton.worker.process.steps.nvtx import NvtxExecutor


class Ranges:
    def __init__(self):
        self.seen = []

    def range_push(self, text):
        self.seen.append(text)

    def range_pop(self):
        self.seen.append("end")


class Executor(SimpleNamespace):
    def launch(self, plan):
        if plan.step == 8:
            raise RuntimeError("the device is gone")

    def collect(self):
        return "result"


def test_each_launch_and_each_wait_has_a_range():
    ranges = Ranges()
    executor = NvtxExecutor(Executor(num_blocks=1, depth=1, max_step_tokens=1, max_masked_tokens=1), ranges)
    executor.launch(SimpleNamespace(step=7, num_decodes=3, num_prefill_tokens=512))
    assert executor.collect() == "result"
    with pytest.raises(RuntimeError):
        executor.launch(SimpleNamespace(step=8, num_decodes=0, num_prefill_tokens=1))
    assert ranges.seen == [
        "launch 7: 3 decodes, 512 prompt tokens",
        "end",
        "collect",
        "end",
        "launch 8: 0 decodes, 1 prompt tokens",
        "end",
    ]
