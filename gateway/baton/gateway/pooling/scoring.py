"""The scores of documents for queries: a cross-encoder's, the cosine of two embeddings, or of their tokens (MaxSim)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from baton.gateway.models.served import ServedModel
from baton.gateway.pooling.averages import normalized
from baton.gateway.pooling.pairs import NamedPair
from baton.gateway.pooling.texts import Named
from baton.gateway.pooling.vectors import Vectors, Wanted, require_task
from baton.gateway.schemas.pooling import VectorFields
from baton.rpc.errors import InvalidRequest
from baton.v1 import types_pb2

_EMBED = types_pb2.POOLING_TASK_EMBED
_TOKEN_EMBED = types_pb2.POOLING_TASK_TOKEN_EMBED


@dataclass(frozen=True, slots=True)
class Scoring:
    """What is computed for scores, and how they follow from it."""

    wanted: Wanted
    num_queries: int  # which come before the documents; 0: pairs are scored

    def scores(self, found: Vectors) -> NDArray[np.float64]:
        """Returns the score of each document with its query."""
        if not self.num_queries:
            return np.concatenate(found.arrays)[:, 0].astype(np.float64)
        if self.wanted.params.task == types_pb2.POOLING_TASK_TOKEN_EMBED:
            return self._late(found.arrays)
        vectors = normalized(np.concatenate(found.arrays).astype(np.float64))
        cosines: NDArray[np.float64] = (vectors[: self.num_queries] * vectors[self.num_queries :]).sum(axis=1)
        return cosines

    def _late(self, arrays: Sequence[NDArray[np.float32]]) -> NDArray[np.float64]:
        """Returns, of each document, the sum over the query's tokens of the largest product with one of its own."""
        queries, documents = arrays[: self.num_queries], arrays[self.num_queries :]
        each = queries if len(queries) > 1 else [queries[0]] * len(documents)
        sums = [(one @ other.T).max(axis=1).sum(dtype=np.float64) for one, other in zip(each, documents, strict=True)]
        return np.array(sums, np.float64)


def scoring_of(
    model: ServedModel,
    fields: VectorFields,
    queries: Sequence[Named],
    documents: Sequence[Named],
    timeout_ms: int = 0,
) -> Scoring:
    """Returns the scoring of documents, each with its query, or all with the only query. Raises InvalidRequest."""
    pooler = model.require_info().pooler
    if not pooler.takes_pairs:
        task = _EMBED if _TOKEN_EMBED not in pooler.tasks or _EMBED in pooler.tasks else _TOKEN_EMBED
        require_task(model, task)
        params = types_pb2.PoolingParams(task=task)
        return Scoring(Wanted(fields, model, [*queries, *documents], params, timeout_ms), len(queries))
    _check_one_class(model, pooler)
    firsts = [*queries] * (len(documents) if len(queries) == 1 else 1)
    pairs = [NamedPair(first, second) for first, second in zip(firsts, documents, strict=True)]
    params = types_pb2.PoolingParams(task=types_pb2.POOLING_TASK_CLASSIFY)
    return Scoring(Wanted(fields, model, pairs, params, timeout_ms), 0)


def check_counts(num_queries: int, num_documents: int, queries: str, documents: str) -> None:
    """Raises InvalidRequest for neither one query nor as many as documents. Takes both fields' names."""
    if num_queries not in (1, num_documents):
        raise InvalidRequest(
            f"{queries} has {num_queries} texts and {documents} {num_documents}; give one of {queries}, or as many",
            field=queries,
        )


def ranked(scores: NDArray[np.float64], most: int | None) -> list[int]:
    """Returns the indices of the highest scores, the highest first. 0 or None: of all."""
    order: list[int] = np.argsort(-scores, kind="stable")[: most or len(scores)].tolist()
    return order


def _check_one_class(model: ServedModel, pooler: types_pb2.PoolerInfo) -> None:
    """Raises InvalidRequest for a classifier of several classes: none of them is the score."""
    if pooler.width != 1:
        raise InvalidRequest(
            f"the model {model.name} has {pooler.width} classes, and a score is that of one; use /classify for it",
            field="model",
        )
