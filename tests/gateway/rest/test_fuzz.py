"""Fuzzes the API in a process of its own: cases are made at collection, which each process of a run would repeat."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_PLUGINS = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "asyncio,timeout,hypothesispytest,schemathesis"}


@pytest.mark.timeout(600)
def test_no_operation_has_a_defect() -> None:
    path = Path(__file__).with_name("fuzzed_operations.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path)],
        env=os.environ | _PLUGINS, cwd=path.parents[3], capture_output=True, text=True, timeout=580, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
