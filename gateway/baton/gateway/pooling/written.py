"""Vectors as clients ask for them: numbers, base64, bytes, or bits. Pure."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from numpy.typing import NDArray

from baton.gateway.pooling.averages import normalized

_INT8_MAX = 127


def written(vectors: NDArray[np.float32], encoding: str | None) -> Any:
    """Returns one vector [width], or several [num_vectors, width], for JSON. None: as numbers.

    int8 and uint8 divide [-1, 1] of a vector of length 1 into 255 steps; uint8 begins at 1. binary and ubinary pack
    the signs of 8 values into a number, the first in its highest bit; binary's numbers are 128 less.
    """
    match encoding:
        case "base64":
            return base64.b64encode(vectors.tobytes()).decode()
        case "int8":
            return _steps(vectors).astype(np.int8)
        case "uint8":
            return (_steps(vectors) + _INT8_MAX + 1).astype(np.uint8)
        case "ubinary":
            return np.packbits(vectors > 0, axis=-1)
        case "binary":
            return (np.packbits(vectors > 0, axis=-1).astype(np.int16) - 128).astype(np.int8)
        case _:
            return np.ascontiguousarray(vectors)


def _steps(vectors: NDArray[np.float32]) -> NDArray[np.int16]:
    unit = normalized(np.atleast_2d(vectors).astype(np.float64)).reshape(vectors.shape)
    return np.rint(unit * _INT8_MAX).astype(np.int16)
