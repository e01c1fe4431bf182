"""A real Prometheus scrapes a fleet over TLS by the jobs of prometheus-tls.yaml, with nothing but places changed."""

from __future__ import annotations

import json
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from contextlib import ExitStack

import pytest
import yaml
from access_rig import key_file
from deploy_tools import ROOT, prometheus_tool
from stack import start_stack, wait_until
from tls_rig import make_certs

from baton.services import ports

CONFIG = ROOT / "deploy" / "prometheus" / "prometheus-tls.yaml"
MONITORS = ROOT / "deploy" / "kubernetes" / "components" / "pod-monitors-tls" / "pod-monitors.yaml"
MOUNTED = "/etc/prometheus/baton-"


def moved(certificates, key_path, targets):
    """The shipped jobs at these targets, with certificates of this folder."""
    config = yaml.safe_load(CONFIG.read_text())
    del config["rule_files"]
    for job in config["scrape_configs"]:
        del job["kubernetes_sd_configs"], job["relabel_configs"]
        job["static_configs"] = [{"targets": targets[job["job_name"]]}]
        job["scrape_interval"] = "1s"
        job["scrape_timeout"] = "1s"
        tls = job["tls_config"]
        tls["server_name"] = tls["server_name"].replace("chat.example.com", "localhost")
        for name, file in (("ca_file", "ca.crt"), ("cert_file", "operator.crt"), ("key_file", "operator.key")):
            if name in tls:
                assert tls[name].startswith(MOUNTED)
                tls[name] = str(certificates / file)
        if "authorization" in job:
            job["authorization"]["credentials_file"] = str(key_path)
    return config


def test_every_job_finds_its_service_up_and_no_other_reader_does(tmp_path):
    prometheus = prometheus_tool("prometheus")
    certificates = make_certs(tmp_path / "certs", fleet="prod")
    keys, (key,) = key_file(tmp_path, [{"scopes": ["metrics"]}])
    (tmp_path / "key").write_text(key)
    with ExitStack() as cleanup:
        flags = {"gateway": ("--api-keys", str(keys))}
        stack = start_stack(tmp_path, cleanup, flags, executor="sim", tls_dir=str(certificates), tls_edge=True)
        targets: dict[str, list[str]] = {}
        for service in stack.services.values():
            targets.setdefault(f"baton-{service.plan.command}", []).append(service.plan.metrics)
        (tmp_path / "prometheus.yaml").write_text(yaml.safe_dump(moved(certificates, tmp_path / "key", targets)))
        (port,) = ports.free_ports(1)
        words = [prometheus, f"--config.file={tmp_path}/prometheus.yaml", f"--storage.tsdb.path={tmp_path}/data"]
        log = cleanup.enter_context((tmp_path / "prometheus.log").open("wb"))
        process = subprocess.Popen([*words, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
        cleanup.callback(process.wait, 30)
        cleanup.callback(process.terminate)

        def ups():
            query = urllib.parse.urlencode({"query": "up == 1"})
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/query?{query}", timeout=10) as answer:
                    found = json.load(answer)["data"]["result"]
            except OSError:
                return False
            return {one["metric"]["instance"] for one in found} == {one for all_ in targets.values() for one in all_}

        wait_until(ups, "every target is up", 90)
        for address in targets["baton-worker"] + targets["baton-router"] + targets["baton-kvstore"]:
            with pytest.raises((urllib.error.URLError, ConnectionError)):
                urllib.request.urlopen(f"http://{address}/metrics", timeout=10)


def test_the_operators_monitors_ask_as_the_jobs_do():
    jobs = {job["job_name"]: job for job in yaml.safe_load(CONFIG.read_text())["scrape_configs"]}
    monitors = {one["metadata"]["name"]: one for one in yaml.safe_load_all(MONITORS.read_text())}
    assert set(jobs) == set(monitors) == {"baton-gateway", "baton-router", "baton-kvstore", "baton-worker"}
    for name, monitor in monitors.items():
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        assert monitor["spec"]["selector"]["matchLabels"] == {"app.kubernetes.io/name": name}
        assert endpoint["scheme"] == jobs[name]["scheme"] == "https"
        assert endpoint["tlsConfig"]["serverName"] == jobs[name]["tls_config"]["server_name"]
        shows = "keySecret" in endpoint["tlsConfig"]
        assert shows == ("cert_file" in jobs[name]["tls_config"]) == (name != "baton-gateway")
