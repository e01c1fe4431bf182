"""Copies pieces out of an executor's blocks and into them: [blocks, layers, bytes]."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from baton.rpc.errors import InvalidRequest
from baton.worker.core import BlockId
from baton.worker.executors.base import Executor
from baton.worker.kv_spec import KvSpec
from baton.worker.transfer.base import KvConversion, Piece

_SMALL_BYTES = 4096  # of one layer of a block; below that, two copies by numpy are faster than one in a loop


def in_place(executor: Executor, layer: int) -> Sequence[NDArray[np.uint8]] | None:
    """Returns the blocks of all KV layers, if the host can read and write this layer's there. States are copied."""
    kv_bytes = executor.kv_bytes
    return kv_bytes if kv_bytes is not None and layer < len(kv_bytes) else None


def block_views(kv_bytes: Sequence[NDArray[np.uint8]], layers: range, block_ids: Sequence[BlockId]) -> list[memoryview]:
    """Returns views of blocks in host memory: one buffer for each block and layer, in a piece's order."""
    rows = [kv_bytes[layer] for layer in layers]
    return [row[block_id].data for block_id in block_ids for row in rows]


def read_piece(executor: Executor, piece: Piece, conversion: KvConversion | None) -> list[memoryview]:
    """Returns the piece's bytes in the receiver's layout: views of the blocks, or a copy."""
    layers = range(piece.layer, piece.layer + piece.num_layers)
    kv_bytes = in_place(executor, piece.layer)
    if conversion is None and kv_bytes is not None:
        return block_views(kv_bytes, layers, piece.block_ids)
    parts = [memoryview(executor.read_blocks(layer, piece.block_ids)) for layer in layers]
    if len(parts) == 1:
        data = parts[0]
    else:
        data = _interleaved(parts, len(piece.block_ids) // executor.kv_spec.layer_pages(piece.layer))
    return [data if conversion is None else conversion.on_host(data, piece)]


def gather_piece(executor: Executor, piece: Piece, conversion: KvConversion | None, out: NDArray[np.uint8]) -> None:
    """Copies the piece in the receiver's layout to the start of `out`. Raises InvalidRequest if `out` is too short."""
    num_blocks, num_layers = len(piece.block_ids), piece.num_layers
    block_bytes = executor.kv_spec.layer_bytes(piece.layer)
    num_bytes = num_blocks * num_layers * block_bytes
    kv_bytes = in_place(executor, piece.layer)
    if conversion is None and kv_bytes is not None and num_bytes <= out.nbytes:
        blocks = out[:num_bytes].reshape(num_blocks, num_layers, block_bytes)
        for i in range(num_layers):
            _gather(kv_bytes[piece.layer + i], piece.block_ids, blocks[:, i])
        return
    start = 0
    for part in read_piece(executor, piece, conversion):
        if start + part.nbytes > out.nbytes:
            raise InvalidRequest(f"a piece is larger than its slot of {out.nbytes} bytes")
        out[start : start + part.nbytes] = np.frombuffer(part, np.uint8)
        start += part.nbytes


def num_piece_bytes(spec: KvSpec, layers: range, num_pages: int, heads: tuple[int, int] | None) -> int:
    """Returns the bytes of a piece of neighbouring layers, which are of one group, in so many pages."""
    group = spec.groups[spec.group_of(layers.start)]
    num_blocks = num_pages // spec.layer_pages(layers.start)
    return spec.bytes_per_block_layer(group, None if heads is None else heads[1]) * num_blocks * len(layers)


def write_piece(
    executor: Executor,
    data: memoryview,
    layers: range,
    block_ids: Sequence[BlockId],
    heads: tuple[int, int] | None,
) -> None:
    """Copies the piece's bytes into these blocks; of states, into their pages."""
    num_blocks = len(block_ids) // executor.kv_spec.layer_pages(layers.start)
    blocks = np.frombuffer(data, np.uint8).reshape(num_blocks, len(layers), -1)
    kv_bytes = in_place(executor, layers.start)
    if heads is None and kv_bytes is not None:
        for index, layer in enumerate(layers):
            kv_bytes[layer][np.asarray(block_ids, np.int64)] = blocks[:, index]
        return
    for index, layer in enumerate(layers):
        part = data if len(layers) == 1 else np.ascontiguousarray(blocks[:, index]).data.cast("B")
        if heads is None:
            executor.write_blocks(layer, block_ids, part)
        else:
            executor.write_blocks(layer, block_ids, part, heads)


def _gather(rows: NDArray[np.uint8], block_ids: Sequence[BlockId], out: NDArray[np.uint8]) -> None:
    """Copies rows [blocks, bytes] of one layer once into `out` [len(block_ids), bytes], which may be strided."""
    if out.flags.c_contiguous:
        np.take(rows, np.asarray(block_ids, np.int64), axis=0, out=out, mode="clip")
    elif rows.shape[1] < _SMALL_BYTES:
        out[:] = rows[np.asarray(block_ids, np.int64)]
    else:
        for row, block_id in zip(out, block_ids, strict=True):
            row[:] = rows[block_id]


def _interleaved(parts: Sequence[memoryview], num_blocks: int) -> memoryview:
    layers = [np.frombuffer(part, np.uint8).reshape(num_blocks, -1) for part in parts]
    return np.stack(layers, axis=1).data.cast("B")
