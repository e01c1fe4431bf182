"""The head that pools on the device: hidden states to vectors in few launches, and one copy of them to the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.kernels.pooling_spec import Activation
from baton.kernels.table import Case, find
from baton.worker.core import Int32, StepPlan, StepResult, TokenMasks
from baton.worker.executors.cuda.pooling.segments import Owners, Text, segments_of
from baton.worker.executors.cuda.pooling.vector_copies import VectorCopies
from baton.worker.models.model import Model
from baton.worker.models.pooling.spec import PoolerSpec

Upload = Callable[[NDArray[np.int64]], Tensor]


class PooledVectors(NamedTuple):
    """Vectors on the device, and whose they are."""

    vectors: Tensor  # [num_vectors, width]
    asked: Tensor  # [2, num_vectors], as finish_vectors takes them
    owners: Owners


class FinishedVectors(NamedTuple):
    """Implements baton.worker.executors.cuda.steps.launched.Results."""

    vectors: Tensor  # [num_vectors, width] fp32
    owners: Owners
    copies: VectorCopies

    def start_copy(self, _: Tensor, /) -> PendingVectors:
        """Queues the copy to the host, in memory of its own."""
        return PendingVectors(self.copies.start(self.vectors), self.owners)


class PendingVectors(NamedTuple):
    """Implements baton.worker.executors.cuda.steps.launched.Pending."""

    vectors: Tensor  # pinned
    owners: Owners

    def read(self, plan: StepPlan) -> StepResult:
        """Returns the vectors of texts that end in this step, and keeps those of others."""
        result = StepResult(plan.step, np.empty(0, np.int32), np.zeros(len(plan.rows), np.int32))
        found = self.vectors.numpy().copy()  # the pinned memory is used again
        start = 0
        for place, text, stop, ends in zip(*self.owners, strict=True):
            vectors = found[start:stop, : text.num_kept]
            start = stop
            if text.chunks or not ends:
                text.chunks.append(vectors)
                vectors = np.concatenate(text.chunks) if ends else vectors
            if ends:
                result.pooled[place] = vectors
        return result


class CudaPoolHead:
    """Implements baton.worker.executors.heads.Head.

    `chunked`: a text may be computed in several steps. What its chunks add up to is then kept by row.
    """

    def __init__(
        self,
        spec: PoolerSpec,
        hidden_size: int,
        num_rows: int,
        device: torch.device,
        upload: Upload,
        copies: VectorCopies,
        *,
        chunked: bool,
    ) -> None:
        self._spec = spec
        self._texts: dict[int, Text] = {}  # by row
        self._upload = upload
        self._copies = copies
        self._keeps = chunked and spec.pick != "last"
        shape = (num_rows if self._keeps else 0, hidden_size)
        self._kept = torch.zeros(shape, dtype=torch.float32, device=device)
        self._activation: Activation = spec.score_activation if spec.labels else _normalizes(spec)
        self._pick = find("pick_vectors", Case("cuda")).load()
        self._finish = find("finish_vectors", Case("cuda")).load()

    def take_rows(self, plan: StepPlan) -> None:
        for row in plan.freed:
            self._texts.pop(row, None)
        for init in plan.admitted:
            assert init.pooling is not None, "requests to this head say what they ask for"
            params, width = init.pooling, self._spec.width
            num_kept = min(params.dimensions or width, width)
            self._texts[init.row] = Text(params.task.by_token, num_kept, params.activation)

    def run(self, plan: StepPlan, step: Any, decoder: Model[Any], hidden: Tensor) -> PooledVectors:
        texts = [self._texts[row] for row in plan.rows.tolist()]
        columns, asked, owners = segments_of(plan, texts, keeps=self._keeps)
        if not columns.size:
            return PooledVectors(hidden[:0], hidden[:0], owners)
        up = self._upload(np.concatenate((columns.ravel(), asked.ravel()))).view(len(columns) + len(asked), -1)
        single = self._spec.pick in ("first", "last")
        # The norm of few vectors after the pick, where that is the same.
        states = hidden if single else decoder.normed(hidden)
        dtype = hidden.dtype if single or self._spec.dense else torch.float32
        picked: Tensor = self._pick(states, up[: len(columns)], self._spec.pick, self._kept, dtype)
        vectors = picked[: owners.num_vectors]
        if owners.num_vectors:
            vectors = decoder.pooled(decoder.normed(vectors) if single else vectors)
        return PooledVectors(vectors, up[len(columns) :, : len(vectors)].contiguous(), owners)

    def finish(
        self, plan: StepPlan, undrawn: PooledVectors, masks: TokenMasks | None, left_out: Int32
    ) -> FinishedVectors:
        vectors = undrawn.vectors
        if undrawn.owners.places:
            vectors = self._finish(vectors, undrawn.asked, self._activation)
        return FinishedVectors(vectors, undrawn.owners, self._copies)


def _normalizes(spec: PoolerSpec) -> Activation:
    return "normalize" if spec.normalize else "none"
