"""A folder of installed packages on this process's path."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture
def packages(tmp_path, monkeypatch):
    folder = tmp_path / "packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    before = set(sys.modules)
    yield folder
    for name in set(sys.modules) - before:
        if str(folder) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
