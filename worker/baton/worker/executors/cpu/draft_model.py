"""Drafts by a smaller model with weights and KV of its own, on the CPU. Its KV is made of the tokens alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from baton.worker.core import Int32, RowInit, StepPlan
from baton.worker.executors.cpu.draft_batch import DraftBatch
from baton.worker.executors.host.draft_models import DraftMemory
from baton.worker.layers.cpu.step import StepInputs
from baton.worker.models.model import make_model
from baton.worker.speculation.proposer import Ask
from baton.worker.weights.loading import LoadedModel


class DraftModel:
    """Implements Proposer and Guesser."""

    costly = True

    def __init__(self, loaded: LoadedModel, dtype: torch.dtype, memory: DraftMemory, vocab_size: int) -> None:
        """`vocab_size` of the model that verifies."""
        self._batch = DraftBatch(loaded.config, loaded.digest, dtype, memory, vocab_size)
        self._model = make_model(loaded.config, loaded.weights, self._batch.device)

    def admit(self, init: RowInit) -> None:
        """Begins a row without KV."""
        self._batch.admit(int(init.row), init.num_prompt_tokens, init.sampling)

    def free(self, row: int, token_ids: Int32) -> None:
        """Frees a row's blocks."""
        self._batch.release(row)

    def sleep(self) -> int:
        """Frees the pages of all blocks, whose KV is computed again when it is needed. Returns their bytes."""
        return self._batch.sleep()

    def close(self) -> None:
        """Does nothing: the memory of weights and KV ends with this object."""

    def propose(self, asked: Sequence[Ask]) -> list[Int32 | Exception]:
        return self._batch.propose(asked, self)

    def forward(self, plan: StepPlan, inputs: StepInputs) -> Tensor:
        """Returns the hidden states of a step of the batch."""
        return self._model.forward(inputs)

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits of rows that `forward` returned."""
        return self._model.logits(hidden)
