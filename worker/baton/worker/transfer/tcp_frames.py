"""A piece of KV on a TCP connection: a header that protects itself, then the bytes. Knows no sockets."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

from baton.rpc.errors import DataLoss

_MAGIC = b"BtKV"
_VERSION = 1
_HAS_CHECKSUM = 1
# magic, version, flags, transfer id, generation, receiver epoch, layer, first index, blocks, bytes, checksum
_FIELDS = struct.Struct("<4sHHQQQIIIII")
_CRC = struct.Struct("<I")

HEADER_BYTES = _FIELDS.size + _CRC.size
MAX_PIECE_BYTES = 64 << 20  # a header that says more is no header


@dataclass(frozen=True, slots=True)
class PieceHeader:
    """One layer of some neighbouring blocks of one transfer."""

    transfer_id: int
    generation: int
    receiver_epoch: int
    layer: int
    first_index: int  # into the descriptor's block list
    num_blocks: int
    num_bytes: int
    checksum: int | None  # CRC-32 of the bytes


def encode_header(header: PieceHeader) -> bytes:
    """HEADER_BYTES bytes."""
    fields = _FIELDS.pack(
        _MAGIC,
        _VERSION,
        0 if header.checksum is None else _HAS_CHECKSUM,
        header.transfer_id,
        header.generation,
        header.receiver_epoch,
        header.layer,
        header.first_index,
        header.num_blocks,
        header.num_bytes,
        header.checksum or 0,
    )
    return fields + _CRC.pack(zlib.crc32(fields))


def decode_header(data: bytes | bytearray | memoryview) -> PieceHeader:
    """Raises DataLoss for bytes that are no header: nothing that follows on the connection can be trusted then."""
    magic, version, flags, *identity, layer, first_index, num_blocks, num_bytes, checksum = _FIELDS.unpack_from(data)
    if magic != _MAGIC or version != _VERSION:
        raise DataLoss(f"a piece begins with {magic!r} version {version}, expected {_MAGIC!r} version {_VERSION}")
    if _CRC.unpack_from(data, _FIELDS.size)[0] != zlib.crc32(memoryview(data)[: _FIELDS.size]):
        raise DataLoss("a piece's header is damaged")
    if num_bytes > MAX_PIECE_BYTES:
        raise DataLoss(f"a piece has {num_bytes} bytes; at most {MAX_PIECE_BYTES} are taken")
    transfer_id, generation, receiver_epoch = identity
    return PieceHeader(
        transfer_id,
        generation,
        receiver_epoch,
        layer,
        first_index,
        num_blocks,
        num_bytes,
        checksum if flags & _HAS_CHECKSUM else None,
    )
