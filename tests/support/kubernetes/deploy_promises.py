"""The promises of deploy/README.md: the table in its section on checking a fleet."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml
from support.kubernetes.deploy_tools import ROOT
from support.kubernetes.fleet_variants import KUBERNETES, VARIANTS, folder_of
from support.kubernetes.manifests import OVERLAYS

PAGE = (ROOT / "deploy" / "README.md").read_text()
COMPONENTS = tuple(sorted(path.name for path in (KUBERNETES / "components").iterdir()))
_ALL = (*OVERLAYS, *VARIANTS)
_HEAD = "| promise | in | object | field | shows |\n"


@dataclass(frozen=True)
class Promise:
    """One row: what `kubectl get OBJECT -o jsonpath='{FIELD}'` prints contains `shows`."""

    what: str
    names: tuple[str, ...]  # overlays and components; `all`
    object: str  # kind/name
    field: str
    shows: str

    def places(self) -> list[str]:
        """Returns the overlays and variants that keep it. The page's commands name the namespace baton."""
        found = dict.fromkeys(place for name in self.names for place in _fields(name))
        return [place for place in found if place in OVERLAYS or VARIANTS[place].namespace == "baton"]

    def is_in(self, printed: str) -> bool:
        return printed.isdecimal() if self.shows == "a number" else self.shows in printed


def promises() -> list[Promise]:
    """Returns the rows of the table."""
    rows = PAGE.partition(_HEAD)[2].partition("\n\n")[0].splitlines()[1:]
    return [_promise(*(cell.strip() for cell in row.strip("|").split(" | "))) for row in rows]


@functools.cache
def components_of(overlay: str) -> set[str]:
    text = yaml.safe_load((folder_of(overlay) / "kustomization.yaml").read_text())
    return {Path(one).name for one in text["components"]}


def _promise(what: str, names: str, target: str, path: str, shows: str) -> Promise:
    return Promise(what, tuple(re.findall(r"[a-z-]+", names)), target, path, shows.strip("`"))


def _fields(name: str) -> Iterator[str]:
    """Yields the overlay of this name, or all that have the component."""
    assert name == "all" or name in OVERLAYS or name in COMPONENTS, f"the page names {name}"
    if name == "all":
        yield from _ALL
    elif name in OVERLAYS:
        yield name
    else:
        yield from (overlay for overlay in _ALL if name in components_of(overlay))
