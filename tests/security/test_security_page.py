"""What SECURITY.md names is there."""

from __future__ import annotations

import dataclasses
import importlib
import re
from pathlib import Path

import pytest

from baton.services.cli import SERVICES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
FLAGS = {flag.rstrip("-*") for flag in re.findall(r"`--([a-z][a-z-]*\*?)", PAGE)}
ELSEWHERE = {"expires", "policies", "service", "ways"}  # of baton keys, baton simulate, audit.py, timing_attack.py


@pytest.mark.parametrize("path", sorted(set(re.findall(r"((?:tests|deploy|requirements)/[\w./-]*\w)", PAGE))))
def test_a_path_is_there(path: str):
    assert (ROOT / path).exists()


def test_its_flags_are_settings():
    configs = (getattr(importlib.import_module(f"{one.package}.config"), one.config) for one in SERVICES.values())
    names = {field.name.replace("_", "-") for config in configs for field in dataclasses.fields(config)}
    unknown = {flag for flag in FLAGS - ELSEWHERE if not any(name.startswith(flag) for name in names)}
    assert not unknown
    assert len(FLAGS) > 15


def test_the_readme_links_to_it():
    assert "(SECURITY.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
