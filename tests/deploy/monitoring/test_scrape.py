"""A real Prometheus scrapes a simulated stack: every target is up, and the dashboards' queries have answers."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.parse
import urllib.request
from contextlib import ExitStack, suppress

import pytest
import yaml
from support.kubernetes.deploy_tools import ROOT, prometheus_tool
from support.processes import ports
from support.processes.stack import MODEL_NAME, RedisServer, Stack, start_stack, wait_until

from baton.services.tools.metrics_table import all_metrics

DASHBOARDS = sorted((ROOT / "deploy" / "grafana" / "dashboards").glob("*.json"))
_PROMPT = "Tell me a long story about a dog and a river. " * 40
# Counted only once it has happened, by labels that are not known before; nothing here makes it happen.
_UNSEEN = {
    "baton_router_refusals_total",
    "baton_gateway_limited_total",
    "baton_gateway_access_refused_total",
    "baton_gateway_limits_redis_errors_total",
    # Of tenants, which need keys: test_scrape_tls.py has some.
    "baton_gateway_tenant_requests_total",
    "baton_gateway_tenant_limited_total",
    "baton_gateway_tenant_input_tokens_total",
    "baton_gateway_tenant_output_tokens_total",
    "baton_gateway_tenant_running",
    "baton_kv_transfer_bytes_per_second",  # only of transports that have moved something
}
_METRIC = re.compile(r"\b(?:baton_|vllm:)\w+")


class Prometheus:
    """A server on a port of its own."""

    def __init__(self, folder, targets) -> None:
        (port,) = ports.free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        config = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
            "scrape_configs": [{"job_name": "baton", "static_configs": [{"targets": list(targets)}]}],
        }
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
        flags = [f"--config.file={folder}/prometheus.yaml", f"--storage.tsdb.path={folder}/data"]
        self._log = (folder / "prometheus.log").open("wb")
        self._process = subprocess.Popen(
            [prometheus_tool("prometheus"), *flags, f"--web.listen-address=127.0.0.1:{port}"],
            stdout=self._log,
            stderr=self._log,
        )

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(30)
        self._log.close()

    def query(self, expression):
        """The samples of an instant query, or nothing while the server starts."""
        with suppress(OSError):
            query = urllib.parse.urlencode({"query": expression})
            with urllib.request.urlopen(f"{self.url}/api/v1/query?{query}", timeout=10) as answer:
                return json.load(answer)["data"]["result"]
        return []


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory):
    """Of a stack that has answered some requests while it was scraped."""
    folder = tmp_path_factory.mktemp("scrape")
    prometheus_tool("prometheus")
    with ExitStack() as cleanup:
        redis = RedisServer(folder, ports.free_ports(1)[0])
        redis.start()
        cleanup.callback(redis.stop)
        extra = {
            "router": ("--peers", "127.0.0.1:9"),
            "worker": ("--sim-eos-every", "0"),
            "gateway": ("--batch-store", str(folder / "batches")),
        }
        stack = start_stack(folder, cleanup, extra=extra, executor="sim", redis_url=redis.url)
        targets = [service.plan.metrics for service in stack.services.values()]
        server = Prometheus(folder, targets)
        cleanup.callback(server.stop)
        wait_until(lambda: len(server.query("up == 1")) == len(targets), "every target is up", 60)
        for number in range(6):
            _ask(stack, number)
        done = "min(rate(baton_gateway_output_tokens_total[30s])) > 0"
        wait_until(lambda: server.query(done), "the answers are scraped", 60)
        yield server


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_queries_of_the_dashboards_have_answers(prometheus, path):
    queries = []
    for expression in _queries(path):
        asked = set(_METRIC.findall(expression))
        filled = expression.replace("[$__rate_interval]", "[60s]").replace("$model", ".*").replace("$route", ".*")
        if not asked & _UNSEEN:
            queries.append(filled)
    wait_until(lambda: all(map(prometheus.query, queries)), "every query has an answer", 30)


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_metrics_of_the_dashboards_exist(path):
    known = {series for row in all_metrics() for series in row.series}
    for expression in (*_queries(path), *_variables(path)):
        asked = set(_METRIC.findall(expression))
        assert asked, expression
        assert asked <= known, expression


def test_the_dashboards_are_those_of_their_program(tmp_path):
    import importlib.util
    import sys

    spec = importlib.util.spec_from_file_location("make_dashboards", ROOT / "deploy" / "grafana" / "make_dashboards.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    made = {dashboard.uid: module.rendered(dashboard) for dashboard in module.DASHBOARDS}
    assert made == {path.stem: json.loads(path.read_text()) for path in DASHBOARDS}, "run `make dashboards`"


def test_panels_do_not_overlap():
    for path in DASHBOARDS:
        places = [panel["gridPos"] for panel in json.loads(path.read_text())["panels"]]
        cells = [
            (x, y)
            for place in places
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        ]
        assert len(cells) == len(set(cells))
        assert max(x for x, _ in cells) < 24


def test_every_exported_metric_is_in_the_table(prometheus):
    known = {series for row in all_metrics() for series in row.series}
    scraped = {sample["metric"]["__name__"] for sample in prometheus.query('{__name__=~"baton_.+|vllm:.+"}')}
    created = {name for name in scraped if name.endswith("_created")}
    assert scraped - created <= known
    assert len(scraped & known) > len(known) / 2


def _ask(stack: Stack, number) -> None:
    stack.chat(f"{number} {_PROMPT}", max_tokens=24)
    body = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 24}
    assert list(stack.stream("/v1/chat/completions", body))
    status, _ = stack.post("/v1/chat/completions", {**body, "top_p": -1})
    assert status == 400


def _queries(path):
    panels = json.loads(path.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", ())]


def _variables(path):
    return [one["definition"] for one in json.loads(path.read_text())["templating"]["list"] if one["type"] == "query"]
