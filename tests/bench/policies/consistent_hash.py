"""Consistent hashing of the prompt's beginning, with bounded loads: no worker has over 1.25 times the mean.

Follows KubeAI's PrefixHash (100 replicas on the ring, mean load percentage 125); the key is the prompt's first blocks.
"""

from __future__ import annotations

from bisect import bisect_right
from hashlib import blake2b

from bench.policies.peer import Peer

_REPLICAS = 100
_MEAN_LOAD_FACTOR = 1.25
_KEY_TOKENS = 256
_HASH_BYTES = 16


class ConsistentHash(Peer):
    """Rebuilds the ring when the workers change."""

    uses_index = False

    def __init__(self, parts):
        super().__init__(parts)
        self._members: tuple[str, ...] = ()
        self._ring: list[tuple[int, str]] = []

    def choose(self, request, workers):
        by_name = {view.worker_id: view for view in workers}
        if tuple(by_name) != self._members:
            self._members = tuple(by_name)
            self._ring = sorted(
                (_point(f"{name}/{replica}".encode()), name) for name in by_name for replica in range(_REPLICAS)
            )
        num_blocks = max(1, _KEY_TOKENS // workers[0].block_size)
        key = request.block_hashes[: num_blocks * _HASH_BYTES] or request.request_id.encode()
        start = bisect_right(self._ring, (_point(key), ""))
        total = sum(self.load(name).num_requests for name in by_name)
        limit = (total + 1) / len(by_name) * _MEAN_LOAD_FACTOR
        for step in range(len(self._ring)):
            name = self._ring[(start + step) % len(self._ring)][1]
            if self.load(name).num_requests + 1 <= max(1.0, limit):
                return by_name[name]
        return by_name[self._ring[start % len(self._ring)][1]]


def _point(key: bytes) -> int:
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "little")
