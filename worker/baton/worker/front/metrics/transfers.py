"""The Prometheus metrics of KV hand-overs. Knows names and help texts, counts nothing.

| metric | labels | |
| --- | --- | --- |
| baton_kv_transfers_total | direction | completed: every block arrived and was verified |
| baton_kv_transfer_bytes_total | direction | of completed transfers |
| baton_kv_transfer_failed_total | direction | leases that ended without their blocks, for any cause |
| baton_kv_transfer_retries_total | | failed transfers that were requested from the same peer again |
| baton_kv_transfer_checksum_errors_total | | failed transfers with a piece whose checksum did not match |
| baton_kv_transfer_refused_total | direction | prefills that were requested and refused |
| baton_kv_transfer_expired_leases_total | | leases that ended by silence |
| baton_kv_transfer_mismatches_total | | peers with an incompatible layout |
| baton_kv_transfer_stray_pieces_total | | pieces of no open lease, discarded |
| baton_kv_transfer_strangers_total | | KV connections refused for a wrong receiver's key |
| baton_kv_transfer_size_bytes | | histogram: size of a received transfer |
| baton_kv_transfer_seconds | | histogram: from the lease to the last block |
| baton_kv_transfer_exposed_seconds | | histogram: from the first token to the last block |
| baton_kv_transfer_tail_seconds | | histogram: from the last layer to TransferComplete, at the sender |
| baton_kv_transfer_bytes_per_second | transport, direction | recent, while bytes moved |
| baton_kv_stranded_blocks | | blocks of leases broken more than 2 s ago; a value above 0 is a defect |

`direction` is `received` at the decode worker and `sent` at the prefill worker. All carry `model_name`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from baton.v1 import control_pb2
from baton.worker.transport_kinds import name_of

_LABELS = ("model_name",)
_DIRECTED = ("model_name", "direction")

# metric, help, and the TransferCounters fields of received and of sent transfers
_BY_DIRECTION = (
    ("baton_kv_transfers", "KV transfers completed.", "num_transfers", "num_sent_transfers"),
    ("baton_kv_transfer_bytes", "KV bytes of completed transfers.", "num_transfer_bytes", "num_sent_bytes"),
    ("baton_kv_transfer_failed", "Leases that ended without blocks.", "num_failed_transfers", "num_failed_pushes"),
    ("baton_kv_transfer_refused", "Refused prefills.", "num_refused_prefills", "num_failed_prefills"),
)
_TOTALS = (
    ("baton_kv_transfer_retries", "Failed transfers that were requested again.", "num_retries"),
    (
        "baton_kv_transfer_checksum_errors",
        "Transfers with a piece whose checksum did not match.",
        "num_checksum_errors",
    ),
    ("baton_kv_transfer_expired_leases", "Leases that ended by silence.", "num_expired_leases"),
    ("baton_kv_transfer_mismatches", "Peers with an incompatible layout.", "num_mismatches"),
    ("baton_kv_transfer_stray_pieces", "Pieces of no open lease, discarded.", "num_stray_pieces"),
    ("baton_kv_transfer_strangers", "KV connections without the receiver's key.", "num_strangers"),
)
_HISTOGRAMS = (
    ("baton_kv_transfer_size_bytes", "KV bytes of a transfer received.", "transfer_bytes"),
    ("baton_kv_transfer_seconds", "From the lease to the last block.", "transfer_seconds"),
    ("baton_kv_transfer_exposed_seconds", "From the first token to the last block.", "exposed_seconds"),
    ("baton_kv_transfer_tail_seconds", "From the last layer to TransferComplete.", "tail_seconds"),
)


def transfer_metrics(counters: control_pb2.TransferCounters, model_name: str) -> Iterator[Metric]:
    """Returns the metrics of a worker's hand-overs."""
    for name, text, received, sent in _BY_DIRECTION:
        metric = CounterMetricFamily(name, text, labels=_DIRECTED)
        metric.add_metric((model_name, "received"), getattr(counters, received))
        metric.add_metric((model_name, "sent"), getattr(counters, sent))
        yield metric
    for name, text, field in _TOTALS:
        metric = CounterMetricFamily(name, text, labels=_LABELS)
        metric.add_metric((model_name,), getattr(counters, field))
        yield metric
    for name, text, field in _HISTOGRAMS:
        yield histogram_metric(name, text, getattr(counters, field), model_name)
    stranded = GaugeMetricFamily("baton_kv_stranded_blocks", "Blocks of leases broken long ago.", labels=_LABELS)
    stranded.add_metric((model_name,), counters.num_stranded_blocks)
    yield stranded
    yield _rates(counters, model_name)


def cumulative_buckets(histogram: control_pb2.Histogram) -> list[tuple[str, float]]:
    """Returns the cumulative buckets for Prometheus. An unset histogram has only the last one."""
    bounds = [*map(str, histogram.bounds), "+Inf"]
    counts = accumulate(map(float, histogram.counts or [0]))
    return list(zip(bounds, counts, strict=True))


def histogram_metric(name: str, text: str, histogram: control_pb2.Histogram, model_name: str) -> Metric:
    """Returns a histogram of the contract as a metric."""
    metric = HistogramMetricFamily(name, text, labels=_LABELS)
    metric.add_metric((model_name,), cumulative_buckets(histogram), histogram.sum)
    return metric


def _rates(counters: control_pb2.TransferCounters, model_name: str) -> Metric:
    labels = ("model_name", "transport", "direction")
    metric = GaugeMetricFamily(
        "baton_kv_transfer_bytes_per_second", "Recent bandwidth, while bytes moved.", labels=labels
    )
    for rate in counters.rates:
        name = name_of(rate.kind, rate.plugin)
        metric.add_metric((model_name, name, "received"), rate.received_bytes_per_second)
        metric.add_metric((model_name, name, "sent"), rate.sent_bytes_per_second)
    return metric
