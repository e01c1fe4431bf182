"""Several processes of one gateway answer a scrape as one."""

from __future__ import annotations

from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from baton.gateway.metrics.counters import GenerationCounters
from baton.gateway.metrics.gateway import GatewayMetrics
from baton.gateway.metrics.siblings import Siblings, merged


def metrics_with(requests: int, connections: int, seconds: float) -> GatewayMetrics:
    metrics = GatewayMetrics(GenerationCounters(), lambda: 0, lambda: connections)
    metrics.offer_vllm_names("m")
    for _ in range(requests):
        metrics.request_answered("/v1/models", "GET", 200, seconds)
        metrics.itl.observe(seconds)
    return metrics


def samples(text: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_counters_gauges_and_buckets_are_added():
    texts = [metrics_with(3, 5, 0.02).exposition(), metrics_with(4, 1, 0.3).exposition()]
    whole, one, two = (samples(text) for text in (merged(texts), *texts))
    assert whole.keys() == one.keys() | two.keys()
    for key, value in whole.items():
        if not key[0].endswith("_created"):
            assert value == one.get(key, 0) + two.get(key, 0), key
    assert whole["baton_gateway_connections", ()] == 6
    assert whole["http_requests_total", (("handler", "/v1/models"), ("method", "GET"), ("status", "2xx"))] == 7


def test_each_family_is_written_once():
    text = merged([metrics_with(1, 1, 0.1).exposition()] * 3).decode()
    helps = [line.split(" ")[2] for line in text.splitlines() if line.startswith("# HELP ")]
    assert len(helps) == len(set(helps)) > 20


def test_the_first_certificate_that_ends_counts():
    name = "baton_tls_certificate_expires_seconds"
    texts = [f"# HELP {name} x\n# TYPE {name} gauge\n{name} {value}\n".encode() for value in (7.0, 5.0, 9.0)]
    assert samples(merged(texts)) == {(name, ()): 5.0}


async def test_whichever_is_scraped_answers_for_all(tmp_path: Path, monkeypatch):
    metrics = [metrics_with(2, 1, 0.1), metrics_with(3, 1, 0.1)]
    siblings = []
    for pid, one in enumerate(metrics):
        monkeypatch.setattr("os.getpid", lambda pid=pid: pid)
        siblings.append(Siblings(str(tmp_path), one.exposition))
    async with siblings[0].answering(), siblings[1].answering():
        texts = [samples(await one.exposition()) for one in siblings]
        key = ("baton_gateway_requests_total", (("route", "/v1/models"), ("status", "200")))
        assert [text[key] for text in texts] == [5, 5]
    (tmp_path / "9.sock").touch()  # of a process that has ended
    assert samples(await siblings[0].exposition())[key] == 2
