"""Every module of the benchmarks can be imported: they follow the code that they measure."""

import importlib
import os
import sys
from collections.abc import Iterator
from unittest.mock import patch

import pytest
from support.processes.service_process import ROOT

MODULES = sorted(
    ".".join(path.relative_to(ROOT / "tests").with_suffix("").parts) for path in (ROOT / "tests/bench").rglob("*.py")
)


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Restores what benchmarks set for their own process: later tests' services would inherit it."""
    with patch.dict(os.environ), patch.object(sys, "path", sys.path[:]):
        yield


@pytest.mark.parametrize("name", MODULES)
def test_a_benchmark_can_be_imported(name: str) -> None:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] in ("baton", "bench", "support"):
            raise
        pytest.skip(f"needs {error.name}")
