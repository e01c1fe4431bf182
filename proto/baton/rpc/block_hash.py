"""The identity of a KV block: a chained BLAKE2b over its tokens. Part of the contract (proto/README.md)."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b

HASH_BYTES = 16
TOKEN_BYTES = 4

_NAMESPACE_KEY = b"baton.namespace.1"


def cache_namespace(model_digest: bytes, block_size: int, adapter: str = "", salt: str = "") -> bytes:
    """Returns the initial value of a prompt's hashes: what changes the KV or must not be shared, but the tokens.

    BLAKE2b-128 with key "baton.namespace.1" over model_digest, block_size (uint32), adapter and salt (UTF-8),
    each preceded by its length as a uint32; integers are little-endian.
    """
    digest = blake2b(key=_NAMESPACE_KEY, digest_size=HASH_BYTES)
    for part in (model_digest, block_size.to_bytes(4, "little"), adapter.encode(), salt.encode()):
        digest.update(len(part).to_bytes(4, "little"))
        digest.update(part)
    return digest.digest()


def hash_blocks(parent: bytes, token_ids: Sequence[int], block_size: int) -> bytes:
    """Returns the hashes of all full blocks of `token_ids`, 16 bytes each, in order.

    hash_0 = BLAKE2b-128(key=parent, tokens_0), hash_i = BLAKE2b-128(key=hash_{i-1}, tokens_i); tokens are little-endian
    uint32. `parent` is the cache namespace, or the hash of the block before the first.
    """
    return hash_packed_blocks(parent, pack_tokens(token_ids), block_size)


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Returns the tokens as little-endian uint32."""
    words = array("I", token_ids)
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def hash_packed_blocks(parent: bytes, token_ids: bytes, block_size: int) -> bytes:
    """Returns hash_blocks of tokens that are little-endian uint32 already."""
    stride = block_size * TOKEN_BYTES
    if len(token_ids) == stride:  # what grows grows block by block
        return blake2b(token_ids, digest_size=HASH_BYTES, key=parent).digest()
    data = memoryview(token_ids)[: len(token_ids) // stride * stride]
    hashes = bytearray()
    for start in range(0, len(data), stride):
        parent = blake2b(data[start : start + stride], digest_size=HASH_BYTES, key=parent).digest()
        hashes += parent
    return bytes(hashes)
