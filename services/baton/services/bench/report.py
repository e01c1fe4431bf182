"""The output of benchmarks: aligned or Markdown tables, JSON, and the machine."""

from __future__ import annotations

import datetime
import importlib.util
import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

_VERSION = re.compile(r"^__version__ = ['\"]([^'\"]+)['\"]", re.MULTILINE)


def render_table(header: Sequence[str], rows: Sequence[Sequence[str]], markdown: bool = False) -> str:
    """Aligns the first column left, and figures right."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    aligned = [
        [line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))]
        for line in lines
    ]
    if not markdown:
        return "\n".join("  ".join(line).rstrip() for line in aligned)
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join("| " + " | ".join(line) + " |" for line in [aligned[0], rule, *aligned[1:]])


def machine_facts(packages: Sequence[str], card: str = "") -> dict[str, str]:
    """Returns the date, the GPU or processor, and the versions on which figures depend."""
    facts = {"date": datetime.date.today().isoformat(), "card": card or _processor()}
    facts["python"] = platform.python_version()
    for name in packages:
        facts[name] = _version(name)
    if hasattr(os, "getloadavg"):
        facts["load"] = f"{os.getloadavg()[0]:.1f}"
    return facts


def facts_line(facts: Mapping[str, str]) -> str:
    """Returns the facts in one line."""
    named = ", ".join(f"{name} {value}" for name, value in facts.items() if name not in ("date", "card"))
    return f"{facts['card']}, {facts['date']}, {named}"


def write_json(path: Path | None, document: Mapping[str, Any]) -> None:
    """Writes the document if a path is given."""
    if path is not None:
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _version(package: str) -> str:
    if package == "torch":
        # Some distributions' metadata lack the local part of the version (+cu130, +cpu).
        return _torch_version()
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def _torch_version() -> str:
    """Reads the version without loading torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return "none"
    text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    found = _VERSION.search(text)
    return found[1] if found else metadata.version("torch")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    cores = len(os.sched_getaffinity(0))
    return f"{next(named, platform.machine())}, {cores} cores"
