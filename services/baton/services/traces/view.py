"""One request's spans as lines for a terminal: a tree with times and bars. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

Value = str | int | float | bool

_BAR = 40  # characters
_NAME = 26
_ROOT = "baton.gateway.request"
# Attributes shown beside each part, by the part's name.
_TOLD: Mapping[str, Sequence[tuple[str, str]]] = {
    "baton.gateway.place": (("baton.excluded_workers", "excluded"),),
    "baton.router.place": (
        ("baton.decode_worker", "decode"),
        ("baton.prefill_worker", "prefill"),
        ("baton.predicted_cached_blocks", "blocks predicted"),
        ("baton.cost_ms", "cost ms"),
    ),
    "baton.gateway.generate": (
        ("baton.worker", "on"),
        ("baton.predicted_cached_tokens", "cached predicted"),
        ("baton.cached_tokens", "found"),
        ("baton.output_tokens", "tokens"),
    ),
    "baton.worker.transfer": (
        ("baton.transport", "by"),
        ("baton.bytes", "bytes"),
        ("baton.exposed_ms", "exposed ms"),
        ("baton.until_launch_ms", "launched after ms"),
        ("baton.retries", "retries"),
    ),
    "baton.worker.decode": (
        ("baton.output_tokens", "tokens"),
        ("baton.preemptions", "preemptions"),
        ("baton.draft_tokens", "guessed"),
        ("baton.accepted_tokens", "right"),
    ),
}


@dataclass(frozen=True, slots=True)
class Span:
    """One span. Times are nanoseconds since 1970."""

    name: str
    instance: str
    span_id: bytes
    parent_id: bytes
    start: int
    end: int
    facts: Mapping[str, Value] = field(default_factory=dict)
    error: str = ""


def root_of(spans: Sequence[Span]) -> Span | None:
    """Returns the request's own span, or None if it has not arrived."""
    return next((span for span in spans if span.name == _ROOT), None)


def render(trace_id: str, spans: Sequence[Span]) -> str:
    """Returns the request as lines: a head, then each part with its begin and length in milliseconds."""
    root = root_of(spans)
    begin = root.start if root is not None else min(span.start for span in spans)
    end = root.end if root is not None else max(span.end for span in spans)
    lines = [_head(trace_id, root)]
    for depth, span in _in_order(spans, root):
        name = "  " * depth + span.name.removeprefix("baton.")
        bar = _bar(span, begin, max(1, end - begin))
        times = f"{(span.start - begin) / 1e6:9.1f} {(span.end - span.start) / 1e6:9.1f}"
        lines.append(f"  {name:<{_NAME}} {times} |{bar}| {_facts(span)}".rstrip())
    return "\n".join(lines)


def _head(trace_id: str, root: Span | None) -> str:
    if root is None:
        return f"{trace_id}  (its request's span has not come)"
    facts = root.facts
    what = facts.get("http.route") or facts.get("rpc.method") or ""
    status = facts.get("http.response.status_code") or facts.get("rpc.grpc.status") or ""
    parts = [trace_id, str(what), str(status), f"{(root.end - root.start) / 1e6:.1f} ms"]
    for name, word in (("prompt_tokens", "prompt"), ("output_tokens", "output"), ("failovers", "failovers")):
        value = facts.get(f"baton.{name}")
        if value:
            parts.append(f"{word} {value}")
    request_id = facts.get("baton.client_request_id") or facts.get("baton.request_id") or ""
    return "  ".join([*parts, str(request_id)]).rstrip()


def _in_order(spans: Sequence[Span], root: Span | None) -> Iterator[tuple[int, Span]]:
    """Sorts parents before their children, and siblings by their begin."""
    known = {span.span_id for span in spans}
    children: dict[bytes, list[Span]] = {}
    for span in sorted(spans, key=lambda span: (span.start, span.end)):
        children.setdefault(span.parent_id if span.parent_id in known else b"", []).append(span)
    waiting = [(0, span) for span in reversed(children.get(b"", []))]
    while waiting:
        depth, span = waiting.pop()
        inner = depth if span is root else depth + 1
        waiting += [(inner, child) for child in reversed(children.get(span.span_id, []))]
        if span is not root:
            yield depth, span


def _bar(span: Span, begin: int, length: int) -> str:
    first = min(_BAR - 1, max(0, (span.start - begin) * _BAR // length))
    last = min(_BAR, max(first + 1, -(-(span.end - begin) * _BAR // length)))
    return " " * first + ("x" if span.error else "=") * (last - first) + " " * (_BAR - last)


def _facts(span: Span) -> str:
    parts = [span.error] if span.error else []
    if span.name.startswith("baton.worker."):
        parts.append(span.instance)
    for key, word in _TOLD.get(span.name, ()):
        value = span.facts.get(key)
        if value not in (None, "", 0):
            parts.append(f"{word} {value:.1f}" if isinstance(value, float) else f"{word} {value}")
    return ", ".join(parts)
