"""A step on the device: its columns, its inputs, and which of its tokens are followed by a sample."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from baton.worker.executors.cuda.inputs.columns import StepColumns
from baton.worker.layers.cuda.step import StepInputs


class DeviceStep(NamedTuple):
    """Made by the stepper, read by heads."""

    columns: StepColumns
    inputs: StepInputs
    chosen_rows: Tensor  # [num_sampled] int32, of the batch
    chosen: Tensor  # [num_sampled], sequences of `columns`
    last: Tensor  # [num_sampled], their last tokens among the step's
