"""The checksum of a piece's bytes: XXH3-64, which is faster than memory. CRC-32 would be slower than a socket."""

from __future__ import annotations

import xxhash


def checksum_of(*buffers: bytes | bytearray | memoryview) -> int:
    """Returns the checksum of the bytes of all buffers, in order."""
    digest = xxhash.xxh3_64()
    for buffer in buffers:
        digest.update(buffer)
    return digest.intdigest()
