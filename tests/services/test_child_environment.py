"""Processes that tests start run the code of the checkout that starts them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.processes.child_environment import child_environment


@pytest.mark.parametrize("own", [{}, {"PYTHONPATH": "/nowhere"}], ids=["plain", "with a path of its own"])
def test_a_child_imports_its_parents_modules(
    own: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "baton" / "marked").mkdir(parents=True)
    (tmp_path / "baton" / "marked" / "__init__.py").write_text("print('found')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    done = subprocess.run(
        [sys.executable, "-c", "import baton.marked"],
        env=child_environment(own),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "found\n"
    path = child_environment(own)["PYTHONPATH"].split(":")
    assert path[: len(own)] == list(own.values())
