"""Finds adapters in a list: `--lora-resolvers adapter-list --lora-resolver-names 'team-*'`.

BATON_ADAPTER_LIST names a JSON file with one folder for each name, such as {"team-a": "summaries/v3"}. The folders lie
beside the file. What is added to the file can be used at once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from baton.worker.adapters.resolvers.interface import AdapterResolver, ResolverContext


class AdapterList(AdapterResolver):
    """Reads the file for each name that is new to the worker."""

    def __init__(self, context: ResolverContext) -> None:
        super().__init__(context)
        self._file = Path(os.environ["BATON_ADAPTER_LIST"])

    @property
    def roots(self) -> Sequence[str]:
        return (str(self._file.parent),)

    def find(self, name: str) -> str | None:
        folder = json.loads(self._file.read_text()).get(name)
        return None if folder is None else str(self._file.parent / folder)
