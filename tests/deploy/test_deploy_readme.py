"""deploy/README.md matches the code: settings, components, flags, files."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import yaml
from support.kubernetes.deploy_tools import ROOT, prometheus_tool
from support.kubernetes.fleet_variants import VARIANTS, folder_of
from support.kubernetes.manifests import OVERLAYS

_DEPLOY = ROOT / "deploy"
_TEXT = (_DEPLOY / "README.md").read_text()
_COMMANDS = re.findall(r"^\s*`?(baton [a-z].*?)(?:`|\.?$|  +#)", _TEXT, re.MULTILINE)


def test_the_table_of_settings_is_the_fleets():
    table = _TEXT.partition("| setting | what |")[2].partition("\n\n")[0]
    listed = {name for row in table.splitlines()[2:] for name in re.findall(r"`([a-zA-Z]+)`", row.split("|")[1])}
    folders = [folder_of(name) for name in (*OVERLAYS, *VARIANTS)]
    assert set().union(*(yaml.safe_load((one / "fleet.yaml").read_text())["data"] for one in folders)) == listed


def test_the_table_of_components_is_the_folder():
    table = _TEXT.partition("| component | what | needs |")[2].partition("\n\n")[0]
    listed = set(re.findall(r"^\| `([a-z-]+)` \|", table, re.MULTILINE))
    assert listed == {path.name for path in (_DEPLOY / "kubernetes" / "components").iterdir()}


@pytest.mark.parametrize("command", sorted(set(_COMMANDS)))
def test_flags_of_commands_exist(command):
    words = command.split()
    names = [word for word in words[1:3] if not word.startswith("-")]
    done = subprocess.run(
        [sys.executable, "-m", "baton.services.cli", *names, "--help"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    for flag in re.findall(r"--[a-z-]+", command):
        assert flag in done.stdout, (command, flag)


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)", _TEXT):
        assert (_DEPLOY / target).exists(), target


@pytest.mark.parametrize("name", ["prometheus.yaml", "prometheus-tls.yaml"])
def test_prometheus_takes_the_configuration(tmp_path, name):
    config = yaml.safe_load((_DEPLOY / "prometheus" / name).read_text())
    assert all((_DEPLOY / "prometheus" / name).exists() for name in config["rule_files"])
    for job in config["scrape_configs"]:
        # Debian builds its Prometheus without Kubernetes.
        assert job.pop("kubernetes_sd_configs") == [{"role": "pod", "namespaces": {"names": ["baton"]}}]
    (tmp_path / "prometheus.yaml").write_text(yaml.safe_dump(config))
    command = [prometheus_tool("promtool"), "check", "config", "--syntax-only", str(tmp_path / "prometheus.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
