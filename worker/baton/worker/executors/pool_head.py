"""The head that pools, on any device: from the hidden states of a step to the vectors of requests."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.worker.core import Int32, PoolingParams, StepPlan, StepResult, TokenMasks
from baton.worker.models.model import Model
from baton.worker.models.pooling.spec import PoolerSpec

Vectors = NDArray[np.float32]
_SMALLEST_NORM = 1e-12  # as torch.nn.functional.normalize


class Pooled(NamedTuple):
    """Vectors of a step, before they are cut, normalized or made probabilities."""

    texts: Tensor | None  # [rows that sample and pool, width]
    text_rows: list[int]  # indices into the plan's rows
    tokens: list[tuple[int, Tensor]]  # index into the plan's rows, and [tokens of its chunk, width]


class PoolHead:
    """Implements baton.worker.executors.heads.Head. Keeps what the chunks of a prompt add up to, by row."""

    def __init__(self, spec: PoolerSpec, hidden_size: int, num_rows: int, device: torch.device) -> None:
        self._spec = spec
        self._params: dict[int, PoolingParams] = {}  # by row
        self._chunks: dict[int, list[Vectors]] = {}  # by row: vectors of the tokens of earlier steps
        keeps = spec.pick != "last"
        self._kept = torch.zeros((num_rows, hidden_size) if keeps else (0, 0), dtype=torch.float32, device=device)

    def take_rows(self, plan: StepPlan) -> None:
        for row in plan.freed:
            self._params.pop(row, None)
            self._chunks.pop(row, None)
        for init in plan.admitted:
            assert init.pooling is not None, "requests to this head say what they ask for"
            self._params[init.row] = init.pooling
            self._chunks.pop(init.row, None)

    def run(self, plan: StepPlan, step: Any, decoder: Model[Any], hidden: Tensor) -> Pooled:
        by_token = [self._params[row].task.by_token for row in plan.rows.tolist()]
        ends = np.cumsum(plan.num_scheduled_tokens, dtype=np.int64)
        starts = ends - plan.num_scheduled_tokens
        texts = [index for index in np.flatnonzero(plan.samples).tolist() if not by_token[index]]
        if self._spec.pick == "last":
            picked = hidden.index_select(0, _indices(ends[texts] - 1, hidden)) if texts else None
            normed = decoder.normed(hidden) if any(by_token) else hidden
            picked = None if picked is None else decoder.normed(picked)
        else:
            normed = decoder.normed(hidden)
            picked = self._keep(plan, starts, ends, by_token, normed, texts)
        vectors = None if picked is None else decoder.pooled(picked)
        tokens = [
            (index, decoder.pooled(normed[starts[index] : ends[index]]))
            for index, wanted in enumerate(by_token)
            if wanted
        ]
        return Pooled(vectors, texts, tokens)

    def finish(self, plan: StepPlan, undrawn: Pooled, masks: TokenMasks | None, left_out: Int32) -> StepResult:
        result = StepResult(plan.step, np.empty(0, np.int32), np.zeros(len(plan.rows), np.int32))
        rows = plan.rows.tolist()
        if undrawn.texts is not None:
            vectors = _on_host(undrawn.texts)
            for place, index in enumerate(undrawn.text_rows):
                result.pooled[index] = self._finished(vectors[place : place + 1], self._params[rows[index]])
        for index, tokens in undrawn.tokens:
            chunks = self._chunks.setdefault(rows[index], [])
            chunks.append(_on_host(tokens))
            if plan.samples[index]:
                whole = np.concatenate(self._chunks.pop(rows[index]))
                result.pooled[index] = self._finished(whole, self._params[rows[index]])
        return result

    def _keep(
        self, plan: StepPlan, starts: NDArray[np.int64], ends: NDArray[np.int64], by_token: list[bool],
        hidden: Tensor, texts: list[int],
    ) -> Tensor | None:  # fmt: skip
        """Adds a step's hidden states to what its rows keep. Returns the picked vectors of the rows in `texts`."""
        rows, first = plan.rows.tolist(), plan.num_computed_tokens == 0
        for index, row in enumerate(rows):
            if by_token[index]:
                continue
            states = hidden[starts[index] : ends[index]]
            kept = self._kept[row]
            match self._spec.pick:
                case "first":
                    if first[index]:
                        kept.copy_(states[0])
                case "max":
                    most = states.amax(0).float()
                    kept.copy_(most if first[index] else torch.maximum(kept, most))
                case _:
                    total = states.sum(0, dtype=torch.float32)
                    kept.copy_(total if first[index] else kept + total)
        if not texts:
            return None
        picked = self._kept.index_select(0, _indices(plan.rows[texts], hidden))
        if self._spec.pick == "mean":
            counts = plan.num_computed_tokens[texts] + plan.num_scheduled_tokens[texts]
            picked = picked / torch.from_numpy(counts.astype(np.float32)).to(picked.device)[:, None]
        return picked.to(hidden.dtype)

    def _finished(self, vectors: Vectors, params: PoolingParams) -> Vectors:
        """Cuts and normalizes embeddings, or makes scores probabilities."""
        if self._spec.labels:
            return _probabilities(vectors, self._spec.score_activation) if params.activation else vectors
        if params.dimensions:
            vectors = vectors[:, : params.dimensions]
        if not (params.activation and self._spec.normalize):
            return vectors
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        return np.asarray(vectors / np.maximum(norms, _SMALLEST_NORM), np.float32)


def _indices(values: NDArray[Any], like: Tensor) -> Tensor:
    return torch.from_numpy(values.astype(np.int64)).to(like.device, non_blocking=True)


def _on_host(vectors: Tensor) -> Vectors:
    found: Vectors = vectors.float().cpu().numpy()
    return found


def _probabilities(scores: Vectors, activation: str) -> Vectors:
    match activation:
        case "sigmoid":
            larger = 1 / (1 + np.exp(-np.abs(scores)))  # of the score and its negative
            return np.asarray(np.where(scores >= 0, larger, 1 - larger), np.float32)
        case "softmax":
            powers = np.exp(scores - scores.max(axis=1, keepdims=True))
            return np.asarray(powers / powers.sum(axis=1, keepdims=True), np.float32)
        case _:
            return scores
