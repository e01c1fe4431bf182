"""The frames of a KV connection: who the two workers are, where pieces are, which slots are free. Knows no sockets.

    sender                          receiver
    OPEN (key, kind, rank, epoch, offer) ->
                                    <- WELCOME (slots) or REFUSED (a google.rpc.Status)
    PIECE (+ bytes, where inline)   ->
                                    <- CREDIT (a slot), once for each piece in a slot

Every frame carries a CRC. After a damaged frame, nothing that follows on the connection can be trusted.
"""

from __future__ import annotations

import enum
import struct
import zlib
from dataclasses import dataclass, field
from typing import NamedTuple

from google.protobuf.message import DecodeError
from google.rpc import status_pb2

from baton.rpc.errors import DataLoss, ServiceError, error_from_detail, status_of
from baton.v1 import kv_pb2, types_pb2
from baton.worker.transfer.bulk import Slots

_MAGIC = b"BtKV"
_VERSION = 3
_HAS_CHECKSUM = 1
_NO_SLOT = 0xFFFFFFFF
_CRC = struct.Struct("<I")
# magic, version, frame, bytes of the body, CRC-32 of the body
_GREETING = struct.Struct("<4sHHII")
# key, kind, tp rank, worker epoch; the offer follows, after the name of a plugin and its length in one byte
_OPEN = struct.Struct("<16sHHQ")
# number of slots, bytes of each; the blob follows
_WELCOME = struct.Struct("<IQ")
# magic, version, flags, transfer id, generation, receiver epoch, layer, layers, first index, blocks, first head, heads,
# slot, microseconds of the copy, bytes, checksum
_PIECE = struct.Struct("<4sHHQQQHHIIHHIIIQ")
_CREDIT = struct.Struct("<II")  # slot, its complement

GREETING_BYTES = _GREETING.size + _CRC.size
PIECE_BYTES = _PIECE.size + _CRC.size
CREDIT_BYTES = _CREDIT.size
KEY_BYTES = 16
MAX_PLUGIN_NAME_BYTES = 255
MAX_GREETING_BODY_BYTES = 4 << 20  # room for long descriptions of RDMA memory
MAX_PIECE_BYTES = 256 << 20  # larger pieces are rejected


class Greeting(enum.IntEnum):
    """The frames that begin a connection."""

    OPEN = 1
    WELCOME = 2
    REFUSED = 3


@dataclass(frozen=True, slots=True)
class Open:
    """A sender's first frame."""

    kind: int  # a kv_pb2.TransportKind
    tp_rank: int
    epoch: int  # of the sender
    offer: bytes
    key: bytes = field(default=bytes(KEY_BYTES), repr=False)  # the receiver's, from the control stream
    plugin: str = ""  # of TRANSPORT_KIND_PLUGIN: its name


class PieceHeader(NamedTuple):
    """The header of a piece: neighbouring layers and blocks of a transfer, as [num_blocks, num_layers, bytes]."""

    transfer_id: int
    generation: int
    receiver_epoch: int
    layer: int
    first_index: int  # index in the descriptor's block list
    num_blocks: int
    num_bytes: int
    checksum: int | None = None  # XXH3-64 of the bytes
    num_layers: int = 1
    heads: tuple[int, int] | None = None  # first and number, of the receiver rank; None: all
    slot: int | None = None  # None: the bytes follow the header
    copy_micros: int = 0  # duration of the copy into the slot, measured by the sender

    def with_checksum(self, checksum: int) -> PieceHeader:
        """Returns a copy with the checksum of its bytes."""
        return self._replace(checksum=checksum)

    def copied_in(self, seconds: float) -> PieceHeader:
        """Returns a copy with the duration of the slot copy."""
        return self._replace(copy_micros=round(seconds * 1e6))


def encode_greeting(what: Greeting, body: bytes) -> bytes:
    """Encodes a first frame."""
    fields = _GREETING.pack(_MAGIC, _VERSION, what, len(body), zlib.crc32(body))
    return fields + _CRC.pack(zlib.crc32(fields)) + body


def decode_greeting(data: bytes | bytearray | memoryview) -> tuple[Greeting, int, int]:
    """Decodes the first GREETING_BYTES: the frame, the length of its body, the body's CRC. Raises DataLoss."""
    magic, version, what, num_bytes, crc = _GREETING.unpack_from(data)
    _check_magic(magic, version, "a connection")
    if _CRC.unpack_from(data, _GREETING.size)[0] != zlib.crc32(memoryview(data)[: _GREETING.size]):
        raise DataLoss("a connection's first frame is damaged")
    if what not in tuple(Greeting) or num_bytes > MAX_GREETING_BODY_BYTES:
        raise DataLoss(
            f"invalid first frame: {what} with {num_bytes} bytes; allowed are {[int(one) for one in Greeting]} "
            f"with up to {MAX_GREETING_BODY_BYTES}"
        )
    return Greeting(what), num_bytes, crc


def check_greeting_body(body: bytes, crc: int) -> None:
    """Raises DataLoss if the body's CRC differs."""
    if zlib.crc32(body) != crc:
        raise DataLoss("a connection's first frame is damaged")


def encode_open(opened: Open) -> bytes:
    """Encodes the sender's first frame."""
    fields = _OPEN.pack(opened.key, opened.kind, opened.tp_rank, opened.epoch)
    if opened.kind == kv_pb2.TRANSPORT_KIND_PLUGIN:
        name = opened.plugin.encode()
        fields += bytes([len(name)]) + name
    return encode_greeting(Greeting.OPEN, fields + opened.offer)


def decode_open(body: bytes) -> Open:
    """Decodes the sender's first frame. Raises DataLoss."""
    if len(body) < _OPEN.size:
        raise DataLoss(f"an OPEN frame has {len(body)} bytes; it must have at least {_OPEN.size}")
    key, kind, tp_rank, epoch = _OPEN.unpack_from(body)
    rest = body[_OPEN.size :]
    if kind != kv_pb2.TRANSPORT_KIND_PLUGIN:
        return Open(kind, tp_rank, epoch, rest, key)
    plugin, offer = _split_plugin(rest)
    return Open(kind, tp_rank, epoch, offer, key, plugin)


def _split_plugin(rest: bytes) -> tuple[str, bytes]:
    """Returns the name of a plugin, and the offer after it. Raises DataLoss."""
    length = rest[0] if rest else 0
    name, offer = rest[1 : 1 + length], rest[1 + length :]
    text = name.decode(errors="replace")
    if not length or len(name) < length or not text.isprintable() or text.encode() != name:
        raise DataLoss("an OPEN frame of a plugin does not name it")
    return text, offer


def encode_welcome(slots: Slots) -> bytes:
    """Encodes the receiver's answer: its slots."""
    return encode_greeting(Greeting.WELCOME, _WELCOME.pack(slots.num_slots, slots.slot_bytes) + slots.blob)


def decode_welcome(body: bytes) -> Slots:
    """Decodes the receiver's answer. Raises DataLoss."""
    if len(body) < _WELCOME.size:
        raise DataLoss(f"a WELCOME frame has {len(body)} bytes; it must have at least {_WELCOME.size}")
    num_slots, slot_bytes = _WELCOME.unpack_from(body)
    return Slots(num_slots, slot_bytes, body[_WELCOME.size :])


def encode_refused(error: ServiceError) -> bytes:
    """Encodes the receiver's refusal."""
    return encode_greeting(Greeting.REFUSED, status_of(error).SerializeToString()[:MAX_GREETING_BODY_BYTES])


def decode_refused(body: bytes) -> ServiceError:
    """Decodes a refusal into the receiver's error. Raises DataLoss."""
    detail = types_pb2.ErrorDetail()
    try:
        status = status_pb2.Status.FromString(body)
        for packed in status.details:
            packed.Unpack(detail)
    except DecodeError as error:
        raise DataLoss("a REFUSED frame is not a google.rpc.Status") from error
    return error_from_detail(status.code, status.message, detail)


def encode_piece(header: PieceHeader) -> bytes:
    """Encodes a header in PIECE_BYTES bytes."""
    first_head, num_heads = header.heads or (0, 0)
    fields = _PIECE.pack(
        _MAGIC,
        _VERSION,
        0 if header.checksum is None else _HAS_CHECKSUM,
        header.transfer_id,
        header.generation,
        header.receiver_epoch,
        header.layer,
        header.num_layers,
        header.first_index,
        header.num_blocks,
        first_head,
        num_heads,
        _NO_SLOT if header.slot is None else header.slot,
        min(header.copy_micros, 0xFFFFFFFF),
        header.num_bytes,
        header.checksum or 0,
    )
    return fields + _CRC.pack(zlib.crc32(fields))


def decode_piece(data: bytes | bytearray | memoryview) -> PieceHeader:
    """Decodes a header. Raises DataLoss if it is invalid."""
    fields = _PIECE.unpack_from(data)
    magic, version, flags, transfer_id, generation, receiver_epoch, layer, num_layers, first_index = fields[:9]
    num_blocks, first_head, num_heads, slot, copy_micros, num_bytes, checksum = fields[9:]
    _check_magic(magic, version, "a piece")
    if _CRC.unpack_from(data, _PIECE.size)[0] != zlib.crc32(memoryview(data)[: _PIECE.size]):
        raise DataLoss("a piece's header is damaged")
    if num_bytes > MAX_PIECE_BYTES:
        raise DataLoss(f"a piece has {num_bytes} bytes; the maximum is {MAX_PIECE_BYTES}")
    return PieceHeader(
        transfer_id,
        generation,
        receiver_epoch,
        layer,
        first_index,
        num_blocks,
        num_bytes,
        checksum if flags & _HAS_CHECKSUM else None,
        num_layers,
        (first_head, num_heads) if num_heads else None,
        None if slot == _NO_SLOT else slot,
        copy_micros,
    )


def encode_credit(slot: int) -> bytes:
    """Encodes a credit in CREDIT_BYTES bytes."""
    return _CREDIT.pack(slot, slot ^ 0xFFFFFFFF)


def decode_credit(data: bytes | bytearray | memoryview) -> int:
    """Returns the slot that is free again. Raises DataLoss."""
    slot, complement = _CREDIT.unpack_from(data)
    if slot != complement ^ 0xFFFFFFFF:
        raise DataLoss("a credit is damaged")
    return int(slot)


def _check_magic(magic: bytes, version: int, what: str) -> None:
    if magic != _MAGIC or version != _VERSION:
        raise DataLoss(f"{what} begins with {magic!r} version {version}, expected {_MAGIC!r} version {_VERSION}")
