"""Finds adapters in the cache of huggingface_hub, by the ids of their repositories. Downloads nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from baton.rpc.errors import Unsupported
from baton.worker.adapters.peft_config import CONFIG_FILE
from baton.worker.adapters.resolvers.interface import AdapterResolver, ResolverContext

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class HubCacheResolver(AdapterResolver):
    """Takes the main branch, as it was downloaded last."""

    def __init__(self, context: ResolverContext) -> None:
        super().__init__(context)
        try:
            from huggingface_hub import constants, try_to_load_from_cache
        except ImportError as error:
            raise Unsupported(
                "lora_resolvers=hub needs huggingface_hub; install the extra hub", field="lora_resolvers"
            ) from error
        self._cache = str(Path(context.hub_cache or constants.HF_HUB_CACHE).expanduser())
        self._look_up = try_to_load_from_cache

    @property
    def roots(self) -> Sequence[str]:
        return (self._cache,)

    def find(self, name: str) -> str | None:
        if not _HUB_ID.fullmatch(name):
            return None
        found = self._look_up(name, CONFIG_FILE, cache_dir=self._cache)
        return str(Path(found).parent) if isinstance(found, str) else None
