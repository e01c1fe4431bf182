"""Appends a service's metrics to a file, one JSON object a line. BATON_JSON_METRICS_FILE names the file."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

from prometheus_client import Metric

from baton.plugins.metric_sinks import MetricSink


class JsonMetrics(MetricSink):
    """Writes every sample once in BATON_JSON_METRICS_SECONDS, or in 10 seconds."""

    def __init__(self, service: str) -> None:
        super().__init__(service)
        self._path = Path(os.environ["BATON_JSON_METRICS_FILE"])
        self.interval_seconds = float(os.environ.get("BATON_JSON_METRICS_SECONDS", "10"))

    def write(self, metrics: Sequence[Metric]) -> None:
        samples = [sample for metric in metrics for sample in metric.samples]
        common = {"time": time.time(), "service": self.service}
        lines = [
            json.dumps({**common, "name": sample.name, "labels": sample.labels, "value": sample.value})
            for sample in samples
        ]
        with self._path.open("a", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")
