"""Block hashes of the prompts in a message, made by the front: a long prompt's would hold the engine up for steps.

A frame of kind *_HASHED is a message behind the hashes of its prompts, which only the front of the same worker writes:

    uint32 number of prompts | uint32 bytes of hashes, for each | hashes of each | the message as it came
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence

import numpy as np
from google.protobuf.message import DecodeError

from baton.rpc.block_hash import HASH_BYTES, hash_packed_blocks
from baton.v1 import worker_pb2

_UINT32 = struct.Struct("<I")
_TOKEN_BYTES = 4
_BLOCKS_PER_SLICE = 128  # hashed at a stretch: a tenth of a millisecond or two


class PromptHasher:
    """Hashes prompts on an event loop, in slices. What is malformed has no hashes: the engine says what is wrong."""

    def __init__(self, block_size: int, max_model_len: int) -> None:
        self._block_size = block_size
        self._max_model_len = max_model_len

    async def of_generate(self, payload: bytes) -> list[bytes]:
        """For a GenerateStreamRequest: of each submit's full blocks, 16 bytes a block."""
        try:
            message = worker_pb2.GenerateStreamRequest.FromString(payload)
        except DecodeError:
            return []
        hashes: list[bytes] = []
        for submit in message.submits:
            parts = (submit.prompt_token_ids, submit.resume.output_token_ids)
            tokens = b"".join(np.array(part, "<u4").tobytes() for part in parts if part)
            hashes.append(await self._hash(submit.cache_namespace, tokens))
        return hashes

    async def of_prefill(self, payload: bytes) -> list[bytes]:
        """For a PrefillStreamRequest: of its prompt's full blocks, if it has one."""
        try:
            message = worker_pb2.PrefillStreamRequest.FromString(payload)
        except DecodeError:
            return []
        if not message.HasField("submit"):
            return []
        return [await self._hash(message.submit.cache_namespace, message.submit.prompt_token_ids)]

    async def _hash(self, namespace: bytes, tokens: bytes) -> bytes:
        if len(namespace) != HASH_BYTES or len(tokens) >= self._max_model_len * _TOKEN_BYTES:
            return b""  # will be refused
        parts: list[bytes] = []
        parent, stride = namespace, self._block_size * _TOKEN_BYTES * _BLOCKS_PER_SLICE
        for start in range(0, len(tokens), stride):
            if start:
                await asyncio.sleep(0)
            part = hash_packed_blocks(parent, tokens[start : start + stride], self._block_size)
            parts.append(part)
            parent = part[-HASH_BYTES:]
        return b"".join(parts)


def join_hashes(hashes: Sequence[bytes], message: bytes) -> bytes:
    """The payload of a frame."""
    sizes = struct.pack(f"<{1 + len(hashes)}I", len(hashes), *map(len, hashes))
    return b"".join((sizes, *hashes, message))


def split_message(payload: bytes) -> tuple[bytes, list[bytes]]:
    """A frame's message, and the hashes of each of its prompts."""
    (count,) = _UINT32.unpack_from(payload)
    sizes = struct.unpack_from(f"<{count}I", payload, _UINT32.size)
    start = _UINT32.size * (1 + count)
    hashes: list[bytes] = []
    for size in sizes:
        hashes.append(payload[start : start + size])
        start += size
    return payload[start:], hashes
