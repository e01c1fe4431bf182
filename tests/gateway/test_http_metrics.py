"""HTTP requests under the names that dashboards for vLLM's server read."""

from __future__ import annotations

from baton.gateway.metrics.http_requests import HttpRequests


def samples(requests: HttpRequests, name: str) -> dict[tuple[str, ...], float]:
    return {
        tuple(sample.labels.values()): sample.value
        for metric in requests.collect()
        for sample in metric.samples
        if sample.name == name
    }


def test_requests_are_counted_by_route_method_and_class_of_status():
    requests = HttpRequests()
    requests.answered("/v1/models", "GET", 200, 0.01)
    requests.answered("/v1/models", "GET", 204, 0.3)
    requests.answered("/v1/models", "GET", 503, 0.7)
    assert samples(requests, "http_requests_total") == {
        ("/v1/models", "GET", "2xx"): 2,
        ("/v1/models", "GET", "5xx"): 1,
    }
    buckets = samples(requests, "http_request_duration_seconds_bucket")
    assert list(buckets.values()) == [1, 2, 3, 3]
    assert samples(requests, "http_request_duration_highr_seconds_count") == {(): 3}


def test_probes_are_not_counted_and_a_clients_method_makes_no_series():
    requests = HttpRequests()
    requests.answered("/health", "GET", 200, 0.01)
    for number in range(50):
        requests.answered("unknown", f"M{number}", 405, 0.0)
    assert samples(requests, "http_requests_total") == {("unknown", "other", "4xx"): 50}
