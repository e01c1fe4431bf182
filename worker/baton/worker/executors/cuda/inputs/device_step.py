"""A step on the device: its columns, its inputs, and the tokens that it samples after."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from baton.worker.executors.cuda.inputs.columns import StepColumns
from baton.worker.layers.cuda.step import StepInputs


class DeviceStep(NamedTuple):
    """The inputs of a step for heads."""

    columns: StepColumns
    inputs: StepInputs
    chosen_rows: Tensor  # [num_sampled] int32, of the batch
    chosen: Tensor  # [num_sampled], sequences of `columns`
    last: Tensor  # [num_sampled], indices of their last tokens in the step
