"""Dashboards of `baton up`: the mounts of compose exist, and a real Prometheus scrapes the targets of `baton up`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request

import yaml
from support.kubernetes.deploy_tools import ROOT, prometheus_tool
from support.processes import ports
from support.processes.stack import wait_until

from baton.services import cli
from baton.services.up.config import UpConfig

LOCAL = ROOT / "deploy" / "local"


def test_mounted_files_exist_and_images_have_one_version():
    for service in yaml.safe_load((LOCAL / "compose.yaml").read_text())["services"].values():
        assert service["image"].partition(":")[2][:1] in "v0123456789"
        for volume in service.get("volumes", ()):
            source = (LOCAL / volume.split(":")[0]).resolve()
            assert source.exists() or source == ROOT / "build", source


def test_the_flags_of_the_documentation_are_those_of_up():
    fields = {name.replace("_", "-") for name in UpConfig.__dataclass_fields__}
    text = (LOCAL / "compose.yaml").read_text()
    assert "--otlp-endpoint" in text
    assert "--metrics-targets" in text
    assert {"otlp-endpoint", "metrics-targets", "trace-sampling"} <= fields


def test_the_configuration_is_one():
    done = subprocess.run([prometheus_tool("promtool"), "check", "config", "--syntax-only", LOCAL / "prometheus.yaml"])
    assert done.returncode == 0


def test_prometheus_finds_every_service_of_up(tmp_path):
    program = prometheus_tool("prometheus")
    (port,) = ports.free_ports(1)
    config = yaml.safe_load((LOCAL / "prometheus.yaml").read_text())
    config["global"]["scrape_interval"] = "1s"
    (tmp_path / "prometheus.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "alerts.yaml").write_text((ROOT / "deploy" / "prometheus" / "alerts.yaml").read_text())
    targets = tmp_path / "targets" / "targets.json"
    words = ["up", "--executor", "sim", "--metrics-targets", str(targets)]
    listen = ["--rest-listen", "127.0.0.1:0", "--grpc-listen", "127.0.0.1:0", "--log-dir", str(tmp_path / "logs")]
    log = tmp_path / "up.log"
    with log.open("wb") as out:
        command = [sys.executable, "-m", "baton.services.cli", *words, *listen]
        up = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out)
        flags = [f"--config.file={tmp_path}/prometheus.yaml", f"--storage.tsdb.path={tmp_path}/data"]
        server = subprocess.Popen([program, *flags, f"--web.listen-address=127.0.0.1:{port}"], stdout=out, stderr=out)
    try:
        wait_until(targets.exists, "the targets are told", 60)
        named = json.loads(targets.read_text())
        assert {one["labels"]["service"] for one in named} == {
            f"baton-{one}" for one in ("gateway", "router", "kvstore", "worker")
        }
        wait_until(lambda: _up(port) == len(named), "every service is scraped", 100)
    finally:
        os.kill(up.pid, signal.SIGTERM)
        server.terminate()
        assert up.wait(60) == 0
        server.wait(30)


def test_a_file_that_cannot_be_written_is_named(capsys):
    edge = ("--rest-listen", "127.0.0.1:0", "--grpc-listen", "127.0.0.1:0")
    assert cli.main(["up", "--executor", "sim", "--metrics-targets", "/proc/no/such/file", *edge], {}) == 2
    assert "--metrics-targets /proc/no/such/file" in capsys.readouterr().err


def _up(port) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/query?query=up==1", timeout=10) as answer:
            return len(json.load(answer)["data"]["result"])
    except OSError:
        return -1
