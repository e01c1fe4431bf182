"""No module imports itself by way of others, imports for type checkers and within functions included."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("proto", "services", "gateway", "router", "worker", "kvstore", "kernels", "models")


def modules_of(root: Path, packages: tuple[str, ...] = PACKAGES) -> dict[str, Path]:
    """Every module by its dotted name."""
    found = {}
    for package in packages:
        for path in (root / package / "baton").rglob("*.py"):
            parts = path.relative_to(root / package).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(name: str, path: Path, known: Mapping[str, Path]) -> set[str]:
    """The modules among `known` that a module imports anywhere."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            submodules = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= submodules & known.keys() or {node.module or ""}
    return (found & known.keys()) - {name}


def cycles(graph: Mapping[str, set[str]]) -> Iterator[list[str]]:
    """A shortest cycle through each module that has one; the same cycle once."""
    seen = set()
    for start in sorted(graph):
        ways, reached = [[start]], {start}
        for way in ways:  # grows: breadth first
            if start in graph[way[-1]]:
                if frozenset(way) not in seen:
                    seen.add(frozenset(way))
                    yield [*way, start]
                break
            for module in sorted(graph[way[-1]] - reached):
                reached.add(module)
                ways.append([*way, module])


def test_no_module_imports_itself_through_others() -> None:
    known = modules_of(ROOT)
    assert len(known) > 500
    graph = {name: imported(name, path, known) for name, path in known.items()}
    assert [" -> ".join(cycle) for cycle in cycles(graph)] == []


def test_a_cycle_is_found_and_named(tmp_path: Path) -> None:
    texts = {
        "a.py": "from baton.b import thing\n",
        "b.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from baton import c\n",
        "c.py": "def late():\n    import baton.a\n",
        "d.py": "import baton.a\n",
    }
    folder = tmp_path / "worker" / "baton"
    folder.mkdir(parents=True)
    for name, text in texts.items():
        (folder / name).write_text(text)
    known = modules_of(tmp_path, ("worker",))
    graph = {name: imported(name, path, known) for name, path in known.items()}
    assert list(cycles(graph)) == [["baton.a", "baton.b", "baton.c", "baton.a"]]
