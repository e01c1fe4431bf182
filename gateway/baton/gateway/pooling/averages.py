"""Means of the vectors of a text's pieces. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_LEAST_LENGTH = 1e-12


def averaged(
    arrays: Sequence[NDArray[np.float32]], num_tokens: Sequence[Sequence[int]], normalize: bool
) -> list[NDArray[np.float32]]:
    """Returns one vector [1, width] a text: the mean of its pieces' vectors, weighted by their numbers of tokens.

    `arrays` has a vector [1, width] for each piece, text after text, and `num_tokens` their sizes by text.
    """
    found: list[NDArray[np.float32]] = []
    at = 0
    for sizes in num_tokens:
        pieces = np.concatenate(arrays[at : at + len(sizes)]).astype(np.float64)
        at += len(sizes)
        mean = np.average(pieces, axis=0, weights=sizes)[None]
        found.append((normalized(mean) if normalize else mean).astype(np.float32))
    return found


def normalized(vectors: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns vectors [num_vectors, width] of length 1."""
    lengths: NDArray[np.float64] = np.linalg.norm(vectors, axis=1, keepdims=True)
    divided: NDArray[np.float64] = vectors / np.maximum(lengths, _LEAST_LENGTH)
    return divided
