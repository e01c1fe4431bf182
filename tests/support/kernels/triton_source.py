"""A Triton kernel that is not loaded yet."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

_SOURCE = """
import triton
import triton.language as tl


@triton.jit
def added(pointer):
    offsets = tl.arange(0, 128)
    tl.store(pointer + offsets, 3 + tl.load(pointer + offsets))
"""


def never_loaded_kernel(folder: Path) -> Any:
    """Returns a kernel that adds to the first 128 elements. Triton requires its source in a file."""
    path = folder / "added.py"
    path.write_text(_SOURCE)
    spec = importlib.util.spec_from_file_location("added", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.added
