"""The page of metrics."""

from __future__ import annotations

from itertools import groupby

from markdown_text import GENERATED_NOTE, cell, code, table

from baton.services.tools.metrics_table import all_metrics


def metrics_page() -> str:
    """Returns a table of each service's metrics."""
    parts = [
        f"# Metrics\n\n{GENERATED_NOTE}\n"
        "The gateway serves `/metrics` beside its REST API; the other services serve it at `--metrics-listen`. "
        "Every service but the gateway also exports the `process_*` metrics of the Prometheus client. "
        "`vllm:*` are the same figures under the names that dashboards made for vLLM query. "
        "`baton metrics` prints this list.\n"
    ]
    for service, rows in groupby(all_metrics(), key=lambda row: row.service):
        cells = [(code(row.name), row.kind, code(", ".join(row.labels)), cell(row.help)) for row in rows]
        parts.append(f"## {service.capitalize()}\n\n{table(('metric', 'type', 'labels', 'what it measures'), cells)}")
    return "\n".join(parts)
