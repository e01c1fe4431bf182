"""What processes that tests and benches start find in their environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path


def child_environment(own: Mapping[str, str]) -> dict[str, str]:
    """This process's variables and `own`; Baton is imported from where this process imports it."""
    roots = [entry for entry in sys.path if entry and (Path(entry) / "baton").is_dir()]
    variables = {**os.environ, **own}
    first = variables.get("PYTHONPATH", "")
    return {**variables, "PYTHONPATH": os.pathsep.join([*filter(None, [first]), *roots])}
