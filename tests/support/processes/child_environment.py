"""The environment of processes that tests and benchmarks start."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path


def child_environment(own: Mapping[str, str]) -> dict[str, str]:
    """Returns this process's variables and `own`. Baton is imported from the same place as in this process."""
    roots = [entry for entry in sys.path if entry and (Path(entry) / "baton").is_dir()]
    variables = {**os.environ, **own}
    first = variables.get("PYTHONPATH", "")
    return {**variables, "PYTHONPATH": os.pathsep.join([*filter(None, [first]), *roots])}
