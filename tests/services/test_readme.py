"""What README.md says can be typed, can be typed."""

import importlib
import re
import shlex
from pathlib import Path

import pytest

from baton.services import settings
from baton.services.cli import SERVICES
from baton.services.run import ProcessConfig

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = [line for line in README.splitlines() if re.match(r"baton (gateway|router|kvstore|worker) ", line)]


def test_there_is_a_command_for_each_service():
    assert {shlex.split(command)[1] for command in COMMANDS} == set(SERVICES)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_accepted(command):
    _, service, *flags = shlex.split(command)
    entry = SERVICES[service]
    config_type = getattr(importlib.import_module(f"{entry.package}.config"), entry.config)
    settings.load(service, (config_type, ProcessConfig), flags, {})


@pytest.mark.parametrize("target", re.findall(r"`make ([a-z-]+)", README))
def test_a_make_target_is_there(target):
    assert re.search(rf"^{target}:.*## ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("path", re.findall(r"`((?:tests|proto|models|deploy|examples)/[\w./-]+)`", README))
def test_a_path_is_there(path):
    assert (ROOT / path).exists()
