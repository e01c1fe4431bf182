"""Drafts by a smaller model with weights and KV of its own, on the device of the model that verifies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from baton.worker.config import WorkerConfig
from baton.worker.core import Int32, RowInit
from baton.worker.executors.cuda.draft_steps import DraftNet, DraftSteps
from baton.worker.executors.host.draft_models import DraftMemory
from baton.worker.executors.kv_dtype import dtype_name
from baton.worker.kv_spec import KvSpec
from baton.worker.models.kv_groups import kv_spec_of
from baton.worker.models.model import make_model
from baton.worker.speculation.proposer import Ask
from baton.worker.weights.loading import LoadedModel

_FEW = 4  # tokens of a row that are computed as decodes are
_NOTHING = np.empty(0, np.int32)


def draft_kv_spec(loaded: LoadedModel, block_size: int, dtype: torch.dtype) -> KvSpec:
    """Returns the spec of a draft model's KV."""
    return kv_spec_of(loaded.config, loaded.digest, block_size, dtype_name(dtype))


class CudaDraftModel:
    """Implements Proposer."""

    costly = True

    def __init__(
        self,
        loaded: LoadedModel,
        dtype: torch.dtype,
        memory: DraftMemory,
        config: WorkerConfig,
        device: torch.device,
        *,
        most: int,
    ) -> None:
        """`most` drafts of a row at a time."""
        spec = draft_kv_spec(loaded, memory.block_size, dtype)
        net = DraftNet(loaded.config, spec, lambda ops, _: make_model(loaded.config, loaded.weights, ops))
        self._steps = DraftSteps(net, dtype, memory, config, device, most=most, few=_FEW)

    def admit(self, init: RowInit) -> None:
        """Begins a row without KV."""
        self._steps.begin(init)

    def free(self, row: int, token_ids: Int32) -> None:
        """Frees a row's blocks."""
        self._steps.release(row)

    def propose(self, asked: Sequence[Ask]) -> list[Int32 | Exception]:
        found = self._steps.drafts(asked)
        return [found.get(ask.row, _NOTHING) for ask in asked]

    def sleep(self) -> int:
        """Frees nothing: the weights and the KV of a draft model stay on the device. Returns 0."""
        return 0

    def close(self) -> None:
        """Does nothing: the memory of weights and KV ends with this object."""
