"""Logits processors in a step on the device, here with host tensors: the rows that change, and what is restored."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from baton.kernels.sampling import columns
from baton.worker.core import RowInit, SamplingParams, StepPlan
from baton.worker.executors.cuda.sampling.processing import DeviceProcessing
from baton.worker.executors.cuda.sampling.row_parameters import flags_of, row_lists
from baton.worker.sampling.processors.interface import LogitsProcessor, ProcessorContext
from baton.worker.sampling.processors.processor_set import ProcessorSet

VOCAB = 8
NONE = np.empty(0, np.int32)


class Batch:
    """The parts of a DeviceBatch that processors use: four rows of tokens."""

    def __init__(self):
        self.token_ids = torch.arange(4 * 16, dtype=torch.int32).view(4, 16)
        self.num_prompt_tokens = np.array([2, 3, 4, 5])

    def upload(self, values):
        return torch.from_numpy(values)


class Recorder(LogitsProcessor):
    """Adds the state to all logits; raises for the state 13."""

    arguments = ("add",)
    on_device = True

    def __init__(self, context):
        super().__init__(context)
        self.seen = []

    def new_row(self, arguments, prompt_token_ids):
        return arguments["add"]

    def apply(self, logits, rows):
        assert logits.dtype == torch.float32
        self.seen.append((rows.states, rows.num_output_tokens, rows.outputs()))
        logits += torch.tensor(rows.states)[:, None]
        if 13 in rows.states:
            raise RuntimeError("13")


def admitted(row, **arguments):
    sampling = SamplingParams(extra_args=tuple(arguments.items()))
    return RowInit(row, np.arange(2, dtype=np.int32), 2, sampling)


@pytest.fixture
def recorder():
    return Recorder(ProcessorContext(VOCAB, torch.device("cpu")))


def step(rows, computed, samples=None, **changes):
    count = len(rows)
    return StepPlan(
        1,
        rows=np.array(rows, np.int32),
        num_scheduled_tokens=np.ones(count, np.int32),
        num_computed_tokens=np.array(computed, np.int32),
        samples=np.array(samples or [True] * count),
        num_decodes=count,
        **changes,
    )


def test_only_rows_with_a_processor_change_and_are_restored(recorder):
    processing = DeviceProcessing(ProcessorSet({"add": recorder}), Batch())
    asking = [admitted(3, add=2), admitted(1, add=5)]
    plan = step([3, 0, 2, 1], [7, 5, 6, 4], [True, True, False, True], admitted=asking)
    processing.take_rows(plan)
    logits = torch.zeros(3, VOCAB, dtype=torch.bfloat16)
    found = processing.run(plan, logits, NONE)
    assert logits[:, 0].tolist() == [2, 0, 5]
    assert recorder.seen == [([2, 5], [3, 2], [[53, 54, 55], [19, 20]])]
    assert (len(found.left_out), dict(found.failed)) == (0, {})
    found.restore(logits)
    assert not logits.any()


def test_rows_that_are_left_out_or_freed_are_not_processed(recorder):
    processing = DeviceProcessing(ProcessorSet({"add": recorder}), Batch())
    plan = step([0, 1, 2], [5, 5, 5], admitted=[admitted(row, add=row + 1) for row in range(3)])
    processing.take_rows(plan)
    logits = torch.zeros(3, VOCAB)
    found = processing.run(plan, logits, np.array([1], np.int32))
    assert logits[:, 0].tolist() == [1, 0, 3]
    assert found.left_out.tolist() == [1]
    plan = step([0, 1, 2], [6, 5, 6], freed=[0], admitted=[RowInit(2, np.zeros(2, np.int32), 2, SamplingParams())])
    processing.take_rows(plan)
    logits = torch.zeros(3, VOCAB)
    processing.run(plan, logits, NONE)
    assert logits[:, 0].tolist() == [0, 2, 0]


def test_a_row_that_fails_is_left_out_and_others_are_changed_once(recorder):
    processing = DeviceProcessing(ProcessorSet({"add": recorder}), Batch())
    plan = step([0, 1, 2], [5, 5, 5], admitted=[admitted(row, add=add) for row, add in enumerate((1, 13, 3))])
    processing.take_rows(plan)
    logits = torch.zeros(3, VOCAB)
    found = processing.run(plan, logits, NONE)
    assert logits[:, 0].tolist() == [1, 0, 3]
    assert found.left_out.tolist() == [1]
    assert found.failed[1].message == "the logits processor add failed (RuntimeError)"


def test_a_row_with_arguments_is_left_to_the_second_draw():
    plain, asking = SamplingParams(temperature=0.0), SamplingParams(temperature=0.0, extra_args=(("add", 1),))
    for sampling, special in ((plain, False), (asking, True)):
        flags = flags_of(sampling, row_lists(sampling, VOCAB))
        assert bool(flags & columns.SPECIAL.value) is special
