"""Packages with plugins in a folder, as pip would install them: the examples' own, and packages made by a test."""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Mapping
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "plugins"


def install_example(folder: Path, kind: str) -> str:
    """Installs the example package of a kind. Returns the plugin's name."""
    package = EXAMPLES / kind
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    for module in package.glob("*.py"):
        shutil.copy(module, folder)
    _describe(folder, project["name"], project["version"], project["entry-points"])
    (entries,) = project["entry-points"].values()
    (name,) = entries
    return str(name)


def install(folder: Path, name: str, source: str, groups: Mapping[str, Mapping[str, str]]) -> None:
    """Installs a package of one module. `groups`: the objects of its entry points by group and name."""
    module = name.replace("-", "_")
    (folder / f"{module}.py").write_text(source)
    entries = {group: {key: f"{module}:{value}" for key, value in named.items()} for group, named in groups.items()}
    _describe(folder, name, "1.0", entries)


def _describe(folder: Path, name: str, version: str, groups: Mapping[str, Mapping[str, str]]) -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = []
    for group, entries in groups.items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
