"""The final table of a chaos run, and the notes below it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from chaos.audit import Audit
from chaos.disturb import Disturbed
from chaos.streams.oracle import percentile

from baton.services.bench.report import render_table

_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Row:
    """One line: the measure, its result, and its limit."""

    what: str
    found: str
    must: str
    good: bool


def completion_row(what: str, disturbed: Disturbed) -> Row:
    """Returns the row of complete and identical streams."""
    found = f"{disturbed.num_good} of {disturbed.num_streams}"
    return Row(what, found, "all", disturbed.num_good == disturbed.num_streams > 0)


def gap_row(what: str, disturbed: Disturbed, limit_seconds: float) -> Row:
    """Returns the row of the p99 gap of affected streams."""
    found = f"{disturbed.hit_p99:.2f} s"
    return Row(what, found, f"<= {limit_seconds:g} s", disturbed.hit_p99 <= limit_seconds)


def restart_row(what: str, disturbed: Disturbed) -> Row:
    """Returns the row of failed requests."""
    failed = disturbed.num_streams - disturbed.num_good
    return Row(what, f"{failed} of {disturbed.num_streams}", "0", failed == 0 and disturbed.num_streams > 0)


def audit_row(what: str, found: Audit) -> Row:
    """Returns the row of leaks and other differences."""
    problems = len(found.problems)
    return Row(what, f"{found.num_leaked_blocks}, {problems} problems", "0, 0 problems", not problems)


def table(rows: Iterable[Row]) -> str:
    """Markdown."""
    cells = [[row.what, row.found, row.must, "yes" if row.good else "NO"] for row in rows]
    return render_table(("what", "found", "must", "reached"), cells, markdown=True)


def details(name: str, disturbed: Disturbed) -> str:
    """Gaps by kind of fault, counters, and the first things that were wrong."""
    kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(disturbed.kinds.items()))
    counted = ", ".join(f"{key.replace('_', ' ')} {value:.0f}" for key, value in disturbed.counted.items())
    lines = [f"{name}: {sum(disturbed.faults.values())} faults in {disturbed.seconds:.0f} s"]
    lines += [f"streams: {kinds}"] if kinds else []
    lines += [counted] if counted else []
    lines += [f"resumed at another gateway: {disturbed.num_resumes}"] if disturbed.num_resumes else []
    rows = [_gaps(fault, disturbed.faults[fault], gaps) for fault, gaps in sorted(disturbed.gaps.items()) if gaps]
    if rows:
        lines.append(render_table(("gap, ms", "faults", "streams", "p50", "p99", "most"), rows))
    return "\n".join([*lines, *first_of(disturbed.wrong)])


def first_of(problems: Sequence[str]) -> list[str]:
    """As many as fit on a screen, and how many more there are."""
    more = len(problems) - _SHOWN
    return [*(f"  {problem}" for problem in problems[:_SHOWN]), *([f"  and {more} more"] if more > 0 else [])]


def _gaps(fault: str, count: int, gaps: Sequence[float]) -> list[str]:
    cells = (percentile(gaps, 0.5), percentile(gaps, 0.99), max(gaps))
    return [fault, str(count), str(len(gaps)), *(f"{1000 * value:.0f}" for value in cells)]
