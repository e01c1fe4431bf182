"""Finds adapters in the folders of --lora-folders: a sub-folder has the adapter's name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from baton.rpc.errors import InvalidRequest
from baton.worker.adapters.peft_config import CONFIG_FILE
from baton.worker.adapters.resolvers.interface import AdapterResolver, ResolverContext


class FolderResolver(AdapterResolver):
    """Looks into each folder, the first one first. A name may have slashes."""

    def __init__(self, context: ResolverContext) -> None:
        super().__init__(context)
        if not context.folders:
            raise InvalidRequest(
                "lora_resolvers=folder needs lora_folders: the folders to look into", field="lora_resolvers"
            )

    @property
    def roots(self) -> Sequence[str]:
        return self.context.folders

    def find(self, name: str) -> str | None:
        for root in self.roots:
            base = Path(root).expanduser()
            folder = base / name
            # Links may lead out of the folder as well as `..` does.
            if folder.resolve().is_relative_to(base.resolve()) and (folder / CONFIG_FILE).is_file():
                return str(folder)
        return None
