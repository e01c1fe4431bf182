"""The plugins that are installed in this Python environment. Reads packages' metadata, and runs none of their code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

from baton.plugins.kinds import KINDS, parse_group

_SEPARATORS = re.compile(r"[-_.]+")  # are alike in names of packages


@dataclass(frozen=True, slots=True)
class InstalledPlugin:
    """One entry point in a group of ours."""

    name: str
    kind: str  # one of KINDS, or a kind of another version of Baton
    version: int | None  # of the interface it was written for; None: its group has none
    distribution: str
    distribution_version: str
    entry_point: metadata.EntryPoint

    @property
    def label(self) -> str:
        """The entry point and its distribution, for errors."""
        entry = self.entry_point
        where = f"{self.distribution} {self.distribution_version}"
        return f"entry point {entry.group}: {entry.name} = {entry.value}, of the package {where}"

    @property
    def problem(self) -> str:
        """Why this version of Baton cannot load it; "": it can."""
        kind = KINDS.get(self.kind)
        if kind is None:
            return f"there is no kind {self.kind!r}; the kinds are {', '.join(KINDS)}"
        if self.version is None:
            return f"its group has no version of the interface; it must be {kind.group}"
        if self.version != kind.version:
            return f"it was written for version {self.version} of {kind.name}; this Baton has version {kind.version}"
        return ""


def installed_plugins() -> list[InstalledPlugin]:
    """Returns all plugins, by name and kind."""
    return sorted(_plugins(), key=lambda plugin: (plugin.name, plugin.kind, plugin.distribution))


def _plugins() -> Iterator[InstalledPlugin]:
    seen: set[str] = set()  # packages: a later copy on the path is not imported
    for distribution in metadata.distributions():
        name = distribution.name
        if not name or (key := _SEPARATORS.sub("-", name).lower()) in seen:
            continue
        seen.add(key)
        for entry_point in distribution.entry_points:
            if (parsed := parse_group(entry_point.group)) is not None:
                yield InstalledPlugin(entry_point.name, *parsed, name, distribution.version, entry_point)
