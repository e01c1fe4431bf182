"""A real Prometheus scrapes a fleet over TLS by the jobs of prometheus-tls.yaml, with nothing but places changed."""

from __future__ import annotations

import json
import ssl
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from contextlib import ExitStack, suppress

import httpx
import pytest
import yaml
from support.gateway.access_rig import key_file
from support.kubernetes.deploy_tools import ROOT, prometheus_tool
from support.network.tls_rig import make_certs
from support.processes import ports
from support.processes.stack import MODEL_NAME, start_stack, wait_until

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


def of_tenants():
    """The tenants' dashboard's queries by tenant."""
    panels = json.loads((ROOT / "deploy" / "grafana" / "dashboards" / "baton-tenants.json").read_text())["panels"]
    texts = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    queries = [text for text in texts if "baton_gateway_tenant_" in text]
    assert len(queries) == 5
    return [text.replace("[$__rate_interval]", "[60s]").replace("$tenant", ".*") for text in queries]


def ask(stack, certificates, key):
    """The status of a chat with this key."""
    body = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    with httpx.Client(verify=ssl.create_default_context(cafile=str(certificates / "ca.crt")), timeout=60) as client:
        url = f"https://localhost:{stack.rest.rpartition(':')[2]}/v1/chat/completions"
        return client.post(url, json=body, headers={"authorization": f"Bearer {key}"}).status_code


def test_every_job_finds_its_service_up_and_no_other_reader_does(tmp_path):
    prometheus = prometheus_tool("prometheus")
    certificates = make_certs(tmp_path / "certs", fleet="prod")
    fields = [{"scopes": ["metrics"]}, {"tenant": "acme"}, {"tenant": "rival"}]
    keys, (key, *tenants) = key_file(tmp_path, fields, {"acme": {}, "rival": {"requests_per_minute": 1}})
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

        def found(expression):
            query = urllib.parse.urlencode({"query": expression})
            with (
                suppress(OSError),
                urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/query?{query}", timeout=10) as answer,
            ):
                return [one["metric"] for one in json.load(answer)["data"]["result"]]
            return []

        def ups():
            return {one["instance"] for one in found("up == 1")} == {one for all_ in targets.values() for one in all_}

        wait_until(ups, "every target is up", 90)
        statuses = [ask(stack, certificates, one) for one in (*tenants, *tenants)]
        assert statuses == [200, 200, 200, 429]
        for expression in of_tenants():
            wait_until(lambda one=expression: found(one), f"{expression} has an answer", 60)
        names = {one["tenant"] for one in found("baton_gateway_tenant_requests_total")}
        assert names == {"acme", "rival"}
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
