"""The Prometheus metrics of TLS: when certificates expire, reloads of their files, and refused peers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.rpc.tls.credentials import EdgeTls, LiveFiles, Tls


class TlsCollector(Collector):
    """Of one process. Looks for new files when it is asked, so that wrong ones show before someone connects.

    | metric | labels | meaning |
    | --- | --- | --- |
    | baton_tls_certificate_expires_seconds | set | Unix time at which the certificate in use ends |
    | baton_tls_reloads_total | set, result | changes of the files: used, or refused and the old ones kept |
    | baton_rpc_refused_peers_total | method | calls of peers whose identity may not make them |

    `set` is the settings' prefix: tls, rest_tls or grpc_tls.
    """

    def __init__(self, *all_tls: Tls | EdgeTls | None) -> None:
        present = [tls for tls in all_tls if tls is not None]
        self._live: Sequence[LiveFiles] = [tls.live for tls in present]
        self._refusals: Sequence[Mapping[str, int]] = [tls.refusals for tls in present if isinstance(tls, Tls)]

    def collect(self) -> Iterable[Metric]:
        expires = GaugeMetricFamily(
            "baton_tls_certificate_expires_seconds", "Unix time at which the certificate ends.", labels=("set",)
        )
        reloads = CounterMetricFamily("baton_tls_reloads", "Changes of TLS files.", labels=("set", "result"))
        refused = CounterMetricFamily("baton_rpc_refused_peers", "Calls of peers that may not.", labels=("method",))
        for live in self._live:
            name = live.files.prefix
            expires.add_metric((name,), live.material.expires_at)
            reloads.add_metric((name, "used"), live.num_reloads)
            reloads.add_metric((name, "refused"), live.num_failed_reloads)
        totals: Counter[str] = Counter()
        for refusals in self._refusals:
            totals.update(dict(refusals))
        for method, count in totals.items():
            refused.add_metric((method,), count)
        return (expires, reloads, refused)
