"""Opens a worker's folder of KV blocks on disk, for its model and the layout of its blocks."""

from __future__ import annotations

import hashlib
from pathlib import Path

from baton.rpc.errors import InvalidRequest
from baton.worker.config import WorkerConfig
from baton.worker.core import HostSlot
from baton.worker.executors.base import ServingExecutor
from baton.worker.kv.disk_tier.folder import BlockFolder
from baton.worker.kv.disk_tier.tier import DiskTier
from baton.worker.kv_spec import KvSpec

_DIGEST_BYTES = 16


def open_disk_cache(config: WorkerConfig, executor: ServingExecutor) -> DiskTier | None:
    """Returns the tier below host memory; None: there is none.

    Raises InvalidRequest for a folder that cannot be used, and for a size that holds no block.
    """
    if not config.disk_cache_dir or executor.host is None or not config.prefix_caching:
        return None

    known: dict[bytes, bytes] = {}  # by the digest of the weights

    def layout() -> bytes:
        spec = executor.kv_spec
        if spec.model_digest not in known:
            known[spec.model_digest] = layout_of(spec, f"{config.executor} {config.invariant}")
        return known[spec.model_digest]

    slot_bytes = len(executor.host.slot_bytes(HostSlot(0)))
    folder = BlockFolder(Path(config.disk_cache_dir), layout(), slot_bytes)
    capacity = int(config.disk_cache_gb * 1e9)
    if capacity < folder.size_of(1):
        folder.close()
        raise InvalidRequest(
            f"disk_cache_gb={config.disk_cache_gb:g} holds no block: it must be at least {folder.size_of(1) / 1e9:g}",
            field="disk_cache_gb",
        )
    return DiskTier(folder, capacity, layout)


def layout_of(spec: KvSpec, computed_by: str) -> bytes:
    """Returns a digest of all that gives the bytes of a block their meaning. `computed_by`: what else changes bits."""
    groups = [
        (group.kind.value, group.layers, group.dtype, group.num_kv_heads, group.head_dim, group.window)
        for group in spec.groups
    ]
    meanings = [(group.kv_scales, group.matrices) for group in spec.groups]
    facts = (spec.model_digest.hex(), spec.block_size, spec.tp_size, spec.tp_rank, groups, meanings, computed_by)
    return hashlib.blake2b(repr(facts).encode(), digest_size=_DIGEST_BYTES).digest()
