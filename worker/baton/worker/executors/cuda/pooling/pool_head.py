"""The head that pools on the device: hidden states to vectors in few launches, and one copy of them to the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.kernels.pooling_spec import Activation
from baton.kernels.table import Case, find
from baton.worker.core import Int32, Int64, PoolingParams, StepPlan, StepResult, TokenMasks
from baton.worker.executors.cuda.pooling.vector_copies import VectorCopies
from baton.worker.models.model import Model
from baton.worker.models.pooling.spec import PoolerSpec

Vectors = NDArray[np.float32]
Upload = Callable[[NDArray[np.int64]], Tensor]


@dataclass(slots=True)
class _Text:
    """A request in a row of the batch."""

    params: PoolingParams
    chunks: list[Vectors] = field(default_factory=list)  # vectors of its tokens, of earlier steps


class _Wanted(NamedTuple):
    """The vectors of one of the plan's rows."""

    place: int  # among the plan's rows
    text: _Text
    start: int  # among the vectors of the step
    stop: int
    kept: int  # first values that are kept
    ends: bool  # the text ends in this step


class PooledVectors(NamedTuple):
    """Vectors on the device, and whose they are."""

    vectors: Tensor  # [num_vectors, width]
    asked: Tensor  # [2, num_vectors], as finish_vectors takes them
    wanted: list[_Wanted]


class FinishedVectors(NamedTuple):
    """Implements baton.worker.executors.cuda.steps.launched.Results."""

    vectors: Tensor  # [num_vectors, width] fp32
    wanted: list[_Wanted]
    copies: VectorCopies

    def start_copy(self, _: Tensor, /) -> PendingVectors:
        """Queues the copy to the host, in memory of its own."""
        return PendingVectors(self.copies.start(self.vectors), self.wanted)


class PendingVectors(NamedTuple):
    """Implements baton.worker.executors.cuda.steps.launched.Pending."""

    vectors: Tensor  # pinned
    wanted: list[_Wanted]

    def read(self, plan: StepPlan) -> StepResult:
        """Returns the vectors of texts that end in this step, and keeps those of others."""
        result = StepResult(plan.step, np.empty(0, np.int32), np.zeros(len(plan.rows), np.int32))
        found: Vectors = self.vectors.numpy()
        for one in self.wanted:
            vectors = found[one.start : one.stop, : one.kept].copy()
            if one.ends and not one.text.chunks:
                result.pooled[one.place] = vectors
                continue
            one.text.chunks.append(vectors)
            if one.ends:
                result.pooled[one.place] = np.concatenate(one.text.chunks)
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
        self._texts: dict[int, _Text] = {}  # by row
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
            self._texts[init.row] = _Text(init.pooling)

    def run(self, plan: StepPlan, step: Any, decoder: Model[Any], hidden: Tensor) -> PooledVectors:
        columns, wanted = self._columns(plan)
        if not columns.size:
            return PooledVectors(hidden[:0], hidden[:0], [])
        up = self._upload(columns.ravel()).view(columns.shape)
        single = self._spec.pick in ("first", "last")
        # The norm of few vectors after the pick, where that is the same.
        states = hidden if single else decoder.normed(hidden)
        dtype = hidden.dtype if single or self._spec.dense else torch.float32
        picked: Tensor = self._pick(states, up[:4], self._spec.pick, self._kept, dtype)
        picked = picked[: wanted[-1].stop if wanted else 0]
        vectors = decoder.pooled(decoder.normed(picked) if single else picked) if wanted else picked
        return PooledVectors(vectors, up[4:, : len(vectors)].contiguous(), wanted)

    def finish(
        self, plan: StepPlan, undrawn: PooledVectors, masks: TokenMasks | None, left_out: Int32
    ) -> FinishedVectors:
        vectors = undrawn.vectors
        if undrawn.wanted:
            vectors = self._finish(vectors, undrawn.asked, self._activation)
        return FinishedVectors(vectors, undrawn.wanted, self._copies)

    def _columns(self, plan: StepPlan) -> tuple[Int64, list[_Wanted]]:
        """Returns segments and what is asked of their vectors, [6, num_vectors]; those that nobody reads come last."""
        counts = plan.num_scheduled_tokens.astype(np.int64)
        starts = np.cumsum(counts) - counts
        parts: list[Int64] = []
        unread: list[Int64] = []
        wanted: list[_Wanted] = []
        stop = 0
        for index, row in enumerate(plan.rows.tolist()):
            text, ends = self._texts[row], bool(plan.samples[index])
            first, count, before = int(starts[index]), int(counts[index]), int(plan.num_computed_tokens[index])
            kept = min(text.params.dimensions or self._spec.width, self._spec.width)
            asked = (kept, int(text.params.activation))
            if text.params.task.by_token:
                segment = np.array([[0, 1, -1, 0, *asked]], np.int64).repeat(count, 0)
                segment[:, 0] = np.arange(first, first + count)
            else:
                slot = row if self._keeps and not (ends and before == 0) else -1
                segment = np.array([[first, count, slot, before, *asked]], np.int64)
                if not ends:
                    if self._keeps:
                        unread.append(segment)
                    continue
            parts.append(segment)
            wanted.append(_Wanted(index, text, stop, stop + len(segment), kept, ends))
            stop += len(segment)
        columns = np.concatenate((*parts, *unread)) if parts or unread else np.empty((0, 6), np.int64)
        return np.ascontiguousarray(columns.T), wanted


def _normalizes(spec: PoolerSpec) -> Activation:
    return "normalize" if spec.normalize else "none"
