"""The block hashes of prompts; what prompts begin with alike is hashed once. Knows no router."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

from baton.rpc.block_hash import HASH_BYTES, hash_blocks

_RUN_TOKENS = 4096
_MAX_RUNS = 4096  # kept; the least recently used go first. With blocks of 16 tokens 16 MB


class PromptHashes:
    """`hash_blocks` with a memory of the runs of blocks that it hashed last."""

    def __init__(self, max_runs: int = _MAX_RUNS) -> None:
        self._max_runs = max_runs
        self._runs: OrderedDict[bytes, bytes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._runs)

    def hash_blocks(self, namespace: bytes, token_ids: Sequence[int], block_size: int) -> bytes:
        """The hashes of all full blocks of `token_ids`, in order. Namespaces tell block sizes apart."""
        run_tokens = max(1, _RUN_TOKENS // block_size) * block_size
        num_whole = len(token_ids) // run_tokens * run_tokens
        words = array("I", token_ids)
        hashes, parent = [], namespace
        for begin in range(0, num_whole, run_tokens):
            run = self._hash_run(parent, words[begin : begin + run_tokens], block_size)
            hashes.append(run)
            parent = run[-HASH_BYTES:]
        hashes.append(hash_blocks(parent, words[num_whole:], block_size))
        return b"".join(hashes)

    def _hash_run(self, parent: bytes, words: array[int], block_size: int) -> bytes:
        key = blake2b(words, key=parent, digest_size=32).digest()
        known = self._runs.get(key)
        if known is None:
            known = self._runs[key] = hash_blocks(parent, words, block_size)
            if len(self._runs) > self._max_runs:
                self._runs.popitem(last=False)
        else:
            self._runs.move_to_end(key)
        return known
