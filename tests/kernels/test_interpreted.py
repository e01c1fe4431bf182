"""The kernels' small cases, in Triton's interpreter: it is chosen at import, so they have a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(900)
def test_every_kernel_equals_its_oracle_in_the_interpreter() -> None:
    folder = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-m", "pytest", str(folder), "-m", "interpreted", "-q", "-p", "no:cacheprovider"],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=folder.parent.parent,
        capture_output=True,
        text=True,
        timeout=880,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-2000:]
