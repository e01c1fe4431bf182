"""A prompt with its block hashes, and the namespace that separates tenants' blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.gateway.core import GenerationRequest, PoolRequest
from baton.rpc.block_hash import cache_namespace, pack_tokens
from baton.rpc.prompt_hashes import PromptHashes
from baton.v1 import types_pb2


@dataclass(frozen=True, slots=True)
class HashedPrompt:
    """A prompt with its block hashes, as sent to routers and workers."""

    token_ids: Sequence[int]
    packed: bytes  # the tokens as little-endian uint32
    namespace: bytes
    block_hashes: bytes
    adapter: types_pb2.AdapterInfo | None = None


def hash_prompt(
    request: GenerationRequest,
    info: types_pb2.ModelInfo,
    hashes: PromptHashes,
    adapter: types_pb2.AdapterInfo | None = None,
) -> HashedPrompt:
    namespace, packed = namespace_of(request, info, adapter), pack_tokens(request.prompt_token_ids)
    return HashedPrompt(
        token_ids=request.prompt_token_ids,
        packed=packed,
        namespace=namespace,
        block_hashes=b"".join(hashes.hash_runs(namespace, packed, info.block_size)),
        adapter=adapter,
    )


def namespace_of(
    request: GenerationRequest | PoolRequest,
    info: types_pb2.ModelInfo,
    adapter: types_pb2.AdapterInfo | None = None,
) -> bytes:
    """Returns the initial value of the hashes of a request's blocks. Of an adapter it is the contents that count."""
    contents = "" if adapter is None else adapter.digest.hex()
    return cache_namespace(info.digest, info.block_size, contents, _salt_of(request))


def _salt_of(request: GenerationRequest | PoolRequest) -> str:
    """Returns a salt that differs between tenants, unless the operator gave them the same one."""
    owner = request.tenant_salt or request.tenant
    if not owner and not request.cache_salt:
        return ""
    # The marker separates an operator's salt from a tenant's name.
    kind = "=" if request.tenant_salt else ""
    return f"{kind}{len(owner)}:{owner}{request.cache_salt}"
