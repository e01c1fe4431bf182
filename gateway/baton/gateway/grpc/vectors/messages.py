"""Vectors as messages of the public gRPC API, in pieces of a limited size."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from baton.gateway.pooling.vectors import Vectors
from baton.v1 import vectors_pb2

MAX_BYTES = 1 << 20  # of one response
_VALUES = b"\x0a"  # the tag of Vector.values on the wire
_MORE = 0x80  # of a number on the wire: another byte follows


def vector_of(values: NDArray[np.float32]) -> vectors_pb2.Vector:
    """Returns a vector's message.

    It is read from its bytes, which are those of the array: setting each value would take 18 times as long.
    """
    data = values.astype("<f4", copy=False).tobytes()
    return vectors_pb2.Vector.FromString(_VALUES + _varint(len(data)) + data) if data else vectors_pb2.Vector()


def usage_of(found: Vectors) -> vectors_pb2.VectorUsage:
    """Returns the token counts."""
    return vectors_pb2.VectorUsage(prompt_tokens=found.usage.prompt_tokens, cached_tokens=found.num_cached_tokens)


def embed_responses(request_id: str, found: Vectors) -> Iterator[vectors_pb2.EmbedResponse]:
    """Yields the first vector of each text, and the usage at last."""
    rows = [array[0] for array in found.arrays]
    pieces = list(_pieces(len(rows), rows[0].nbytes))
    for piece in pieces:
        response = vectors_pb2.EmbedResponse(request_id=request_id)
        response.embeddings.extend(map(vector_of, rows[piece]))
        if piece is pieces[-1]:
            response.usage.CopyFrom(usage_of(found))
        yield response


def pool_responses(request_id: str, found: Vectors) -> Iterator[vectors_pb2.PoolResponse]:
    """Yields all vectors of each text, text after text, and the usage at last."""
    pieces = [
        (index, array[piece])
        for index, array in enumerate(found.arrays)
        for piece in _pieces(len(array), array[0].nbytes)
    ]
    for number, (index, vectors) in enumerate(pieces, 1):
        response = vectors_pb2.PoolResponse(request_id=request_id, index=index)
        response.vectors.extend(map(vector_of, vectors))
        if number == len(pieces):
            response.usage.CopyFrom(usage_of(found))
        yield response


def _pieces(count: int, num_bytes: int) -> Iterator[slice]:
    """Yields the parts of `count` vectors of this size that fit into one response each."""
    step = max(1, MAX_BYTES // num_bytes)
    for begin in range(0, count, step):
        yield slice(begin, begin + step)


def _varint(number: int) -> bytes:
    found = bytearray()
    while number >= _MORE:
        found.append(number % _MORE | _MORE)
        number //= _MORE
    found.append(number)
    return bytes(found)
