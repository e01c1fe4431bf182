"""Where the time of a neighbour's slowest first tokens went, by the spans of their requests."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from support.network.otlp_collector import Collector, Span

from baton.services.bench.report import render_table

_EXPORT_SECONDS = 3.0  # spans leave every 2
_STAGES = ("receive", "prepare", "place", "of it router", "submit", "queue", "prefill", "return")


@dataclass(frozen=True, slots=True)
class FirstToken:
    """A request's times, in nanoseconds since 1970."""

    began: int
    received: int  # the first token, by the client
    trace_id: str

    @property
    def seconds(self) -> float:
        """Returns how long the token took."""
        return (self.received - self.began) / 1e9


def stages_of(token: FirstToken, spans: Sequence[Span]) -> dict[str, float]:
    """Returns the seconds of each stage; none of a request without spans.

    receive  until the gateway has the headers       submit   until the worker has the request
    prepare  body, template, tokens and limits       queue    until the step that computes its prompt
    place    asking the router                       prefill  until the first token, at the worker
    return   until the client has the token
    """
    of: Mapping[str, Span] = {span.name: span for span in spans}
    found = ("baton.gateway.request", "baton.gateway.prepare", "baton.gateway.place", "baton.worker.queue",
             "baton.worker.prefill")  # fmt: skip
    if not all(name in of for name in found):
        return {}
    request, prepare, place, queue, prefill = (of[name] for name in found)
    router = of.get("baton.router.place")
    seconds = (
        (request.start - token.began) / 1e9,
        prepare.seconds,
        place.seconds,
        0.0 if router is None else router.seconds,
        (queue.start - place.end) / 1e9,
        queue.seconds,
        prefill.seconds,
        (token.received - prefill.end) / 1e9,
    )
    return dict(zip(_STAGES, seconds, strict=True))


def show_slowest(tokens: Sequence[FirstToken], collector: Collector, count: int) -> str:
    """Returns a table of the slowest first tokens, in milliseconds, after waiting for their spans."""
    time.sleep(_EXPORT_SECONDS)
    traces = collector.traces()
    begin = min((token.began for token in tokens), default=0)
    lines = []
    for token in sorted(tokens, key=lambda token: token.seconds, reverse=True)[:count]:
        stages = stages_of(token, traces.get(token.trace_id, []))
        parts = [f"{1000 * stages[name]:.1f}" if stages else "?" for name in _STAGES]
        lines.append([f"{(token.began - begin) / 1e9:.1f}", f"{1000 * token.seconds:.1f}", *parts])
    return render_table(("at s", "ms", *_STAGES), lines, markdown=True)
