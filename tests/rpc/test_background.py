"""A process in the background has its lower priority before its module is imported."""

import os
import subprocess
from pathlib import Path

import pytest

from baton.rpc.background import command

REPORT = """
import os, sys
from pathlib import Path

group = Path("/proc/self/autogroup")
print(__name__, sys.argv[1:], os.nice(0), group.read_text().split()[-1] if group.exists() else "none")
"""


@pytest.mark.parametrize("nice", [5, 10])
def test_a_module_runs_with_its_arguments_and_less_of_the_cpus(tmp_path, nice):
    (tmp_path / "report.py").write_text(REPORT)
    path = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    done = subprocess.run(
        command(nice, "report", "3", "x"), env={**os.environ, "PYTHONPATH": path}, start_new_session=True,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    group = nice if Path("/proc/self/autogroup").exists() else "none"
    assert done.stdout == f"__main__ ['3', 'x'] {min(19, os.nice(0) + nice)} {group}\n"
