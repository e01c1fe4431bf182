"""The block hashes of prompts. Hashes common beginnings once. Knows no router and no engine."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from hashlib import sha256

from baton.rpc.block_hash import HASH_BYTES, TOKEN_BYTES, hash_packed_blocks, pack_tokens

_RUN_BLOCKS = 256
_MAX_RUNS = 4096  # kept; the least recently used go first. With runs of 256 blocks 16 MB


class PromptHashes:
    """`hash_blocks` with a memory of the runs of blocks that it hashed last.

    A run is found by a hash of its tokens and of all before them, so that no other prompt's hashes can be taken for it.
    """

    def __init__(self, max_runs: int = _MAX_RUNS, run_blocks: int = _RUN_BLOCKS) -> None:
        self._max_runs = max_runs
        self._run_blocks = run_blocks
        self._runs: OrderedDict[bytes, bytes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._runs)

    def hash_blocks(self, namespace: bytes, token_ids: Sequence[int], block_size: int) -> bytes:
        """Returns the hashes of all full blocks of `token_ids`, in order.

        Different block sizes have different namespaces.
        """
        return b"".join(self.hash_runs(namespace, pack_tokens(token_ids), block_size))

    def hash_runs(self, namespace: bytes, packed: bytes, block_size: int) -> Iterator[bytes]:
        """Yields the same hashes run by run, for tokens that are little-endian uint32; hashes a run when asked for."""
        stride = self._run_blocks * block_size * TOKEN_BYTES
        num_whole = len(packed) // stride * stride
        parent = namespace
        for begin in range(0, num_whole, stride):
            run = self._hash_run(parent, packed[begin : begin + stride], block_size)
            yield run
            parent = run[-HASH_BYTES:]
        if rest := hash_packed_blocks(parent, packed[num_whole:], block_size):
            yield rest

    def _hash_run(self, parent: bytes, packed: bytes, block_size: int) -> bytes:
        key = sha256(parent + packed).digest()  # a third of BLAKE2b's time, where the CPU has instructions for it
        known = self._runs.get(key)
        if known is None:
            known = self._runs[key] = hash_packed_blocks(parent, packed, block_size)
            if len(self._runs) > self._max_runs:
                self._runs.popitem(last=False)
        else:
            self._runs.move_to_end(key)
        return known
