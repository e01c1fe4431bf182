"""The gateway's metrics, exported to Prometheus as baton_gateway_*. No label is looked up per token."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.gateway.metrics.counters import ENDINGS, TOKEN_BOUNDS, GenerationCounters
from baton.gateway.metrics.histogram import BucketCounts
from baton.gateway.metrics.http_requests import HttpRequests
from baton.gateway.metrics.phase_times import PhaseTimes
from baton.gateway.metrics.siblings import Siblings
from baton.gateway.metrics.vllm import VllmAliases, VllmEndings

# the bounds that vLLM's dashboards expect
_TTFT_BOUNDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_REFUSAL_BOUNDS = (0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.02, 0.05, 0.1, 0.5, 1, 5)
_REFUSED = (429, 503)
_ITL_BOUNDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_E2E_BOUNDS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)

# field of GenerationCounters, name, help
_GENERATION_COUNTERS = (
    ("placements", "baton_gateway_placements", "Placements requested from routers."),
    ("placement_retries", "baton_gateway_placement_retries", "Placement attempts that failed and were repeated."),
    ("placement_failures", "baton_gateway_placement_failures", "Placements that no router made."),
    ("failovers", "baton_gateway_failovers", "Choices that moved to another worker."),
    ("lost_streams", "baton_gateway_lost_worker_streams", "Worker streams that ended with running requests."),
    ("silent_workers", "baton_gateway_silent_workers", "Worker streams ended because the worker was silent."),
    ("stalled_workers", "baton_gateway_stalled_workers", "Reports of a stalled device by workers with requests."),
    (
        "poisonous_requests",
        "baton_gateway_poisonous_requests",
        "Requests refused because the workers they ran on died.",
    ),
    ("protocol_errors", "baton_gateway_protocol_errors", "Frames or tokens that could not be handled."),
    ("dropped_reports", "baton_gateway_dropped_reports", "Placement outcomes that no router accepted."),
)


class GatewayMetrics:
    """All metrics of this process, in their own registry."""

    def __init__(
        self,
        counters: GenerationCounters,
        in_flight: Callable[[], float],
        connections: Callable[[], float],
        phases: PhaseTimes | None = None,  # None: outcomes are not observed
    ) -> None:
        self.registry = CollectorRegistry()
        self.siblings: Siblings | None = None  # the other processes of this gateway
        self._requests = self._counter("baton_gateway_requests", "HTTP requests answered.", "route", "status")
        self._requests_of: dict[tuple[str, int], Counter] = {}
        self._rejected = self._counter("baton_gateway_rejected", "Generations refused or failed.", "reason")
        self._resolved = self._counter(
            "baton_gateway_resolved_adapters",
            "Names of no model or adapter that workers were asked to load: loaded, missing, failed; or remembered, "
            "refused without asking.",
            "outcome",
        )
        self._tool_calls = self._counter("baton_gateway_tool_calls", "Calls of tools on MCP servers.", "outcome")
        self.tool_seconds = self._bucket_counts(
            "baton_gateway_tool_call_seconds", "Time that a call of a tool on an MCP server took.", _E2E_BOUNDS
        )
        self.ttft = self._histogram("baton_gateway_ttft_seconds", "Request to first token.", _TTFT_BOUNDS)
        self.e2e = self._histogram("baton_gateway_e2e_seconds", "Request to the end of the response.", _E2E_BOUNDS)
        self.prompt_tokens = self._counter("baton_gateway_prompt_tokens", "Prompt tokens of complete responses.")
        self.output_tokens = self._counter("baton_gateway_output_tokens", "Output tokens of complete responses.")
        self.cached_tokens = self._counter("baton_gateway_cached_tokens", "Prompt tokens that workers had cached.")
        self.aborted = self._counter("baton_gateway_aborted", "Requests whose client disconnected.")
        self._gauge("baton_gateway_in_flight", "Running generations (choices).", in_flight)
        self._gauge("baton_gateway_connections", "Open REST connections.", connections)
        self.itl = self._bucket_counts(
            "baton_gateway_itl_seconds", "Time between two arrivals of tokens of one choice.", _ITL_BOUNDS
        )
        self.tpot = self._bucket_counts(
            "baton_gateway_tpot_seconds",
            "Time per output token after the first, for responses with one choice.",
            _ITL_BOUNDS,
        )
        self.prompt_sizes = self._bucket_counts(
            "baton_gateway_request_prompt_tokens", "Prompt tokens of a complete response.", TOKEN_BOUNDS
        )
        self.output_sizes = self._bucket_counts(
            "baton_gateway_request_output_tokens", "Output tokens of a complete response.", TOKEN_BOUNDS
        )
        self.computed_sizes = self._bucket_counts(
            "baton_gateway_request_computed_tokens", "Prompt tokens of a complete response not cached.", TOKEN_BOUNDS
        )
        self.refusals = self._bucket_counts(
            "baton_gateway_rejection_seconds", "Request to its refusal with 429 or 503.", _REFUSAL_BOUNDS
        )
        self._http = HttpRequests()
        self._generation_counters = counters
        self.phases = phases or PhaseTimes()
        collectors = (counters.requested_choices, counters.requested_tokens, _GenerationCollector(counters))
        for collector in (*collectors, *self.phases.all):
            self.registry.register(collector)

    def request_answered(self, route: str, method: str, status: int, seconds: float) -> None:
        """Counts an HTTP request. `route` has a fixed set of values and is never a client's text."""
        counter = self._requests_of.get((route, status))
        if counter is None:
            counter = self._requests_of[route, status] = self._requests.labels(route, str(status))
        counter.inc()
        self._http.answered(route, method, status, seconds)

    def generation_rejected(self, reason: str) -> None:
        """Counts a generation that was refused or failed. `reason` is an error type."""
        self._rejected.labels(reason).inc()

    def adapter_resolved(self, outcome: str) -> None:
        """Counts a name that may be an adapter's."""
        self._resolved.labels(outcome).inc()

    def tool_called(self, outcome: str, seconds: float) -> None:
        """Counts a call on an MCP server, which is completed or failed."""
        self._tool_calls.labels(outcome).inc()
        self.tool_seconds.observe(seconds)

    def exposition(self) -> bytes:
        """Returns all metrics in Prometheus' text format 0.0.4."""
        return generate_latest(self.registry)

    def offer_vllm_names(self, model_name: str) -> None:
        """Exports the metrics of `model_name` under vLLM's names too, and its HTTP requests."""
        histograms: dict[str, Collector] = {
            "vllm:time_to_first_token_seconds": self.ttft,
            "vllm:inter_token_latency_seconds": self.itl,
            "vllm:request_time_per_output_token_seconds": self.tpot,
            "vllm:e2e_request_latency_seconds": self.e2e,
            "vllm:request_prompt_tokens": self.prompt_sizes,
            "vllm:request_generation_tokens": self.output_sizes,
            "vllm:request_prefill_kv_computed_tokens": self.computed_sizes,
            "vllm:request_params_max_tokens": self._generation_counters.requested_tokens,
            "vllm:request_params_n": self._generation_counters.requested_choices,
            "vllm:request_max_num_generation_tokens": self.phases.longest,
            "vllm:request_queue_time_seconds": self.phases.queue,
            "vllm:request_prefill_time_seconds": self.phases.prefill,
            "vllm:request_decode_time_seconds": self.phases.decode,
            "vllm:request_inference_time_seconds": self.phases.inference,
        }
        self.registry.register(VllmAliases(model_name, histograms))
        self.registry.register(self._http)
        self.registry.register(VllmEndings(model_name, self._generation_counters))

    def register(self, collector: Collector) -> None:
        self.registry.register(collector)

    def _gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        Gauge(name, text, registry=self.registry).set_function(read)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _bucket_counts(self, name: str, text: str, bounds: Sequence[float]) -> BucketCounts:
        counts = BucketCounts(name, text, bounds)
        self.registry.register(counts)
        return counts

    def _histogram(self, name: str, text: str, bounds: Sequence[float]) -> Histogram:
        return Histogram(name, text, buckets=bounds, registry=self.registry)


class _GenerationCollector(Collector):
    """Exports the generation counters."""

    def __init__(self, counters: GenerationCounters) -> None:
        self._counters = counters

    def collect(self) -> Iterable[Metric]:
        for field, name, text in _GENERATION_COUNTERS:
            yield CounterMetricFamily(name, text, value=getattr(self._counters, field))
        finished = CounterMetricFamily(
            "baton_gateway_finished_choices", "Finished choices by reason.", labels=("ending",)
        )
        for ending in ENDINGS:
            finished.add_metric((ending,), self._counters.finished_choices[ending])
        yield finished


class AnswerMeter:
    """Measures one response."""

    __slots__ = ("_first", "_last", "_metrics", "_started")

    def __init__(self, metrics: GatewayMetrics, started: float, num_choices: int) -> None:
        self._metrics = metrics
        self._started = started  # time.perf_counter
        self._first = 0.0
        self._last = [0.0] * num_choices

    def on_tokens(self, index: int, num_tokens: int = 1) -> None:
        """Records that tokens of a choice arrived.

        `num_tokens`: how many gaps between tokens to count, each with the mean. 1: the time since the last delta.
        """
        now = time.perf_counter()
        last = self._last[index]
        if last:
            self._metrics.itl.observe((now - last) / num_tokens, num_tokens)
        else:
            self._metrics.ttft.observe(now - self._started)
            self._first = self._first or now
        self._last[index] = now

    @property
    def first_token_seconds(self) -> float | None:
        """Returns the seconds from the request's arrival to the first token of any choice, or None without tokens."""
        return self._first - self._started if self._first else None

    @property
    def generation_seconds(self) -> float:
        """Returns the seconds between the first and the last token."""
        return max(self._last) - self._first if self._first else 0.0

    @property
    def num_choices(self) -> int:
        return len(self._last)

    def on_done(self, prompt_tokens: int, output_tokens: int, cached_tokens: int) -> None:
        """Records the end of a complete response."""
        self._metrics.e2e.observe(time.perf_counter() - self._started)
        self._metrics.prompt_sizes.observe(prompt_tokens)
        self._metrics.output_sizes.observe(output_tokens)
        self._metrics.computed_sizes.observe(prompt_tokens - cached_tokens)
        if len(self._last) == 1 and output_tokens > 1 and self._first:
            self._metrics.tpot.observe((self._last[0] - self._first) / (output_tokens - 1))
        self._count(prompt_tokens, output_tokens, cached_tokens)

    def _count(self, prompt_tokens: int, output_tokens: int, cached_tokens: int) -> None:
        self._metrics.prompt_tokens.inc(prompt_tokens)
        self._metrics.output_tokens.inc(output_tokens)
        self._metrics.cached_tokens.inc(cached_tokens)

    def on_error(self, reason: str, status: int) -> None:
        """Records a response that is an error or ends with one."""
        if status in _REFUSED and not self._first:
            self._metrics.refusals.observe(time.perf_counter() - self._started)
        self._metrics.generation_rejected(reason)

    def on_abort(self) -> None:
        """Records that the client disconnected."""
        self._metrics.aborted.inc()


class BackgroundMeter(AnswerMeter):
    """Measures a response of a batch. Its tokens count; its times do not, because they would hide those of clients."""

    __slots__ = ()

    def on_tokens(self, index: int, num_tokens: int = 1) -> None:
        """Records no time between tokens."""

    def on_done(self, prompt_tokens: int, output_tokens: int, cached_tokens: int) -> None:
        self._count(prompt_tokens, output_tokens, cached_tokens)
