"""The number of KV blocks: those that the setting's blocks of all layers take, or as many as a memory holds."""

from __future__ import annotations

from baton.rpc.errors import InvalidRequest
from baton.worker.config import WorkerConfig
from baton.worker.executors.host.resources import usable_memory
from baton.worker.kv_spec import KvSpec
from baton.worker.models.config import ModelConfig

_MOST_DEFAULT_KV_BYTES = 4 << 30
_KV_SHARE_OF_MEMORY = 10


def pool_size(config: WorkerConfig, model: ModelConfig, spec: KvSpec) -> int:
    """Returns the number of blocks, 0 of a model that is not cached. Raises InvalidRequest for too few."""
    if not model.cached:
        if config.host_cache_gb:
            raise InvalidRequest(
                f"host_cache_gb={config.host_cache_gb}: {model.architecture} keeps no KV, so there is nothing to copy; "
                "it must be 0",
                field="host_cache_gb",
            )
        if config.kv_cache_dtype != "auto":
            raise InvalidRequest(
                f"kv_cache_dtype={config.kv_cache_dtype}: {model.architecture} keeps no KV; it must be auto",
                field="kv_cache_dtype",
            )
        return 0
    if not config.num_blocks:
        return _num_blocks_for(config.kv_cache_memory, spec)
    num_blocks, needed = spec.num_pages(config.num_blocks), spec.most_blocks(1, 1)
    if num_blocks < needed:
        least = -(-needed * spec.page_bytes // spec.bytes_per_block)
        raise InvalidRequest(
            f"num_blocks={config.num_blocks} holds no block of each group of layers: it must be at least {least}",
            field="num_blocks",
        )
    return num_blocks


def _num_blocks_for(memory: int, spec: KvSpec) -> int:
    if not memory:
        memory = min(usable_memory() // _KV_SHARE_OF_MEMORY, _MOST_DEFAULT_KV_BYTES)
    least = spec.most_blocks(1, 1) * spec.page_bytes
    if memory < least:
        raise InvalidRequest(
            f"kv_cache_memory={memory} holds no block: it must be at least {least} bytes",
            field="kv_cache_memory",
        )
    return memory // spec.page_bytes
