"""SGLang's router, cache_aware: a tree of routed prompts, and the shortest queue if loads are out of balance.

Defaults from its documentation: cache threshold 0.3, balance thresholds 64 requests and 1.5 times. Out of balance: the
worker with the fewest requests. Else, if the tree's longest match covers more than the threshold, its worker; else the
worker with the smallest tree. The tree has routed prompts, and ignores evictions by workers.
"""

from __future__ import annotations

from bench.policies.peer import Peer

_CACHE_THRESHOLD = 0.3
_BALANCE_ABS = 64
_BALANCE_REL = 1.5
_HASH_BYTES = 16


class CacheAware(Peer):
    """Uses blocks as the tree's nodes."""

    def __init__(self, parts):
        super().__init__(parts)
        self._owners: dict[bytes, list[str]] = {}  # workers to which a block was routed
        self._sizes: dict[str, int] = {}

    def choose(self, request, workers):
        chosen = self._choose(request, workers)
        self._insert(request.block_hashes, chosen.worker_id)
        return chosen

    def _choose(self, request, workers):
        loads = {view.worker_id: self.load(view.worker_id).num_requests for view in workers}
        most, least = max(loads.values()), min(loads.values())
        if most - least > _BALANCE_ABS and most > least * _BALANCE_REL:
            return min(workers, key=lambda view: loads[view.worker_id])
        by_name = {view.worker_id: view for view in workers}
        owner, matched = self._match(request.block_hashes, by_name)
        share = matched * workers[0].block_size / max(1, request.num_prompt_tokens)
        if owner is not None and share > _CACHE_THRESHOLD:
            return by_name[owner]
        return min(workers, key=lambda view: (self._sizes.get(view.worker_id, 0), loads[view.worker_id]))

    def _match(self, block_hashes, by_name):
        owner, matched = None, 0
        for start in range(0, len(block_hashes), _HASH_BYTES):
            owners = self._owners.get(block_hashes[start : start + _HASH_BYTES], ())
            found = next((name for name in owners if name in by_name), None)
            if found is None:
                break
            owner, matched = found, matched + 1
        return owner, matched

    def _insert(self, block_hashes, worker_id):
        for start in range(0, len(block_hashes), _HASH_BYTES):
            owners = self._owners.setdefault(block_hashes[start : start + _HASH_BYTES], [])
            if worker_id not in owners:
                owners.append(worker_id)
                self._sizes[worker_id] = self._sizes.get(worker_id, 0) + 1
