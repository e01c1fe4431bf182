"""Prompts between the front and the engine of one worker: tokens as arrays, with their block hashes.

The front does the work for each token and block, which would delay steps on the engine's thread. It hashes again what
the gateway and a decode worker have hashed: a wrong hash from another process would give the KV of one prompt to
another. A common prefix of prompts is hashed once. A prompt is parsed once, here; the engine parses the rest of its
message again, in 3 to 11 us. Gateways send prompts as numbers, and not packed as decode workers do, because older
workers read only numbers: 32 Ki tokens take 0.3 ms here and 2 ms at the gateway. A frame of kind *_HASHED is a message
after its prompts. Only the front writes it; no other process can.

    uint32 number of prompts | of each: uint32 bytes of tokens, uint32 bytes of hashes | of each: both | the message
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from baton.rpc.block_hash import HASH_BYTES
from baton.rpc.prompt_hashes import PromptHashes
from baton.v1 import worker_pb2

_UINT32 = struct.Struct("<I")
_TOKEN_BYTES = 4
_MIN_TAKEN_OUT = 512  # the fewest tokens worth removing from a message, which is then encoded again
_RUN_BLOCKS = 128  # hashed without a pause: 0.1 to 0.2 ms


class KnownPrompt(NamedTuple):
    """The front's data about one prompt of a message."""

    token_ids: bytes = b""  # the prompt as little-endian uint32; empty: the message has it
    block_hashes: bytes = b""  # of the full blocks of prompt and output so far, 16 bytes each; empty: not computed


class PromptReader:
    """Reads messages on an event loop, and hashes in slices. The engine reports malformed messages."""

    def __init__(self, block_size: int, max_model_len: int) -> None:
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._hashes = PromptHashes(run_blocks=_RUN_BLOCKS)

    async def read_generate(self, payload: bytes) -> tuple[bytes, list[KnownPrompt]]:
        """Returns a GenerateStreamRequest without its long prompts, and the prompts of its submits."""
        try:
            message = worker_pb2.GenerateStreamRequest.FromString(payload)
        except DecodeError:
            return payload, []
        prompts: list[KnownPrompt] = []
        for submit in message.submits:
            prompt = np.array(submit.prompt_token_ids, "<u4").tobytes()
            output = np.array(submit.resume.output_token_ids, "<u4").tobytes()
            hashes = await self._hash(submit.cache_namespace, prompt + output)
            if len(prompt) < _MIN_TAKEN_OUT * _TOKEN_BYTES:
                prompt = b""
            else:
                submit.ClearField("prompt_token_ids")
            prompts.append(KnownPrompt(prompt, hashes))
        shortened = any(prompt.token_ids for prompt in prompts)
        return message.SerializeToString() if shortened else payload, prompts

    async def read_prefill(self, payload: bytes) -> tuple[bytes, list[KnownPrompt]]:
        """Returns a PrefillStreamRequest, and its prompt if it has one. The message keeps the packed tokens."""
        try:
            message = worker_pb2.PrefillStreamRequest.FromString(payload)
        except DecodeError:
            return payload, []
        if not message.HasField("submit"):
            return payload, []
        submit = message.submit
        return payload, [KnownPrompt(block_hashes=await self._hash(submit.cache_namespace, submit.packed_prompt))]

    async def _hash(self, namespace: bytes, tokens: bytes) -> bytes:
        if len(namespace) != HASH_BYTES or len(tokens) >= self._max_model_len * _TOKEN_BYTES:
            return b""  # the engine refuses it
        parts: list[bytes] = []
        for part in self._hashes.hash_runs(namespace, tokens, self._block_size):
            parts.append(part)
            if len(part) == _RUN_BLOCKS * HASH_BYTES:
                await asyncio.sleep(0)
        return b"".join(parts)


def join_prompts(message: bytes, prompts: Sequence[KnownPrompt]) -> bytes:
    """Encodes the payload of a frame."""
    parts = [part for prompt in prompts for part in prompt]
    sizes = struct.pack(f"<{1 + len(parts)}I", len(prompts), *map(len, parts))
    return b"".join((sizes, *parts, message))


def split_prompts(payload: bytes) -> tuple[bytes, list[KnownPrompt]]:
    """Decodes a frame's message and prompts."""
    (count,) = _UINT32.unpack_from(payload)
    sizes = struct.unpack_from(f"<{2 * count}I", payload, _UINT32.size)
    start = _UINT32.size * (1 + 2 * count)
    parts: list[bytes] = []
    for size in sizes:
        parts.append(payload[start : start + size])
        start += size
    return payload[start:], [KnownPrompt(*pair) for pair in zip(parts[::2], parts[1::2], strict=True)]
