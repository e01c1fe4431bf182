"""Encodes what the two ends of an rdma connection exchange: the offer, and the slots. Pure; never pickled."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

from baton.rpc.errors import Mismatch
from baton.worker.transfer.kinds.rdma.nixl import Memory

_MAGIC = b"BRDM"
_VERSION = 1
_OFFER = struct.Struct("<4sH")  # magic, version
# magic, version, whether on a device, device index, address, bytes, length of the name, length of the metadata
_REGION = struct.Struct("<4sH?xIQQHI")
_CHECKSUM = struct.Struct("<I")
_MAX_NAME_BYTES = 128
_MAX_METADATA_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class RemoteRegion:
    """A receiver's staging memory, as its NIXL agent describes it."""

    agent: str
    metadata: bytes  # serialized by NIXL
    memory: Memory  # an address range of the receiver's process


def encode_offer() -> bytes:
    """Encodes a sender's offer."""
    return _OFFER.pack(_MAGIC, _VERSION)


def check_offer(offer: bytes) -> None:
    """Raises Mismatch for a sender of another version."""
    if len(offer) != _OFFER.size:
        raise Mismatch(f"an rdma offer has {len(offer)} bytes, expected {_OFFER.size}")
    _check_version(*_OFFER.unpack(offer))


def encode_region(region: RemoteRegion) -> bytes:
    """Encodes the blob of `Slots`."""
    name = region.agent.encode()
    head = _REGION.pack(
        _MAGIC,
        _VERSION,
        region.memory.on_device,
        region.memory.device,
        region.memory.address,
        region.memory.num_bytes,
        len(name),
        len(region.metadata),
    )
    body = head + name + region.metadata
    return body + _CHECKSUM.pack(zlib.crc32(body))


def decode_region(blob: bytes, expected_bytes: int) -> RemoteRegion:
    """Decodes the blob of `Slots`. Raises Mismatch if it is invalid, or describes another number of bytes."""
    fixed = _REGION.size + _CHECKSUM.size
    if len(blob) < fixed:
        raise Mismatch(f"the rdma slots are described by {len(blob)} bytes, expected at least {fixed}")
    magic, version, on_device, device, address, num_bytes, name_bytes, metadata_bytes = _REGION.unpack_from(blob)
    _check_version(magic, version)
    if not 0 < name_bytes <= _MAX_NAME_BYTES or not 0 < metadata_bytes <= _MAX_METADATA_BYTES:
        raise Mismatch(f"the rdma slots name an agent of {name_bytes} bytes and metadata of {metadata_bytes} bytes")
    if len(blob) != fixed + name_bytes + metadata_bytes:
        raise Mismatch(f"rdma slots are described by {len(blob)} bytes, expected {fixed + name_bytes + metadata_bytes}")
    if _CHECKSUM.unpack_from(blob, len(blob) - _CHECKSUM.size)[0] != zlib.crc32(blob[: -_CHECKSUM.size]):
        raise Mismatch("the description of the rdma slots has a wrong checksum")
    if num_bytes != expected_bytes:
        raise Mismatch(f"the rdma slots are {num_bytes} bytes of memory, expected {expected_bytes}")
    name = blob[_REGION.size : _REGION.size + name_bytes]
    metadata = blob[_REGION.size + name_bytes : -_CHECKSUM.size]
    try:
        return RemoteRegion(name.decode(), bytes(metadata), Memory(address, num_bytes, on_device, device))
    except UnicodeDecodeError:
        raise Mismatch("the agent name of the rdma slots is not UTF-8") from None


def _check_version(magic: bytes, version: int) -> None:
    if magic != _MAGIC:
        raise Mismatch(f"an rdma blob begins with {magic!r}, expected {_MAGIC!r}")
    if version != _VERSION:
        raise Mismatch(f"the peer has version {version} of the rdma transport, this worker has {_VERSION}")
