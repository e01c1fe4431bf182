"""`baton plugins`: the installed plugins, and the kinds that exist. Runs no code of a plugin."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from typing import Any

from baton.plugins.installed import InstalledPlugin, installed_plugins
from baton.plugins.kinds import KINDS, Kind

_ABOUT = "Lists the plugins that are installed, and the kinds that exist. A service loads those that --plugins names."


def main(argv: Sequence[str]) -> int:
    """Prints the list. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="baton plugins", description=_ABOUT)
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    options = parser.parse_args(list(argv))
    found = installed_plugins()
    if options.json:
        print(
            json.dumps(
                {"plugins": list(map(_as_json, found)), "kinds": list(map(_kind_json, KINDS.values()))}, indent=1
            )
        )
    else:
        print("\n".join(_lines(found)))
    return 0


def _as_json(plugin: InstalledPlugin) -> dict[str, Any]:
    return {
        "name": plugin.name,
        "kind": plugin.kind,
        "version": plugin.version,
        "package": plugin.distribution,
        "package_version": plugin.distribution_version,
        "object": plugin.entry_point.value,
        "problem": plugin.problem,
    }


def _kind_json(kind: Kind) -> dict[str, Any]:
    return {
        "kind": kind.name,
        "version": kind.version,
        "group": kind.group,
        "services": list(kind.services),
        "summary": kind.summary,
    }


def _lines(found: Sequence[InstalledPlugin]) -> Iterator[str]:
    if found:
        yield from _table(("PLUGIN", "KIND", "PACKAGE", "OBJECT"), list(map(_row, found)))
    else:
        yield "no plugin is installed"
    yield ""
    kinds = [(kind.group, ", ".join(kind.services), kind.summary) for kind in KINDS.values()]
    yield from _table(("ENTRY POINT GROUP", "LOADED BY", "A PLUGIN"), kinds)


def _row(plugin: InstalledPlugin) -> tuple[str, ...]:
    package = f"{plugin.distribution} {plugin.distribution_version}"
    problem = f" (cannot be loaded: {plugin.problem})" if plugin.problem else ""
    return plugin.name, plugin.kind, package, plugin.entry_point.value + problem


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
