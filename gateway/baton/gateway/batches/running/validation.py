"""Checks the whole input of a batch before its first line runs."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from baton.gateway.batches.running.lines import MAX_LINES, Line, LineProblem, Read, lines_of, request_of
from baton.gateway.batches.types import BatchError

_MAX_ERRORS = 100  # listed; the others are counted


@dataclass(slots=True)
class Validated:
    """The result of a validation."""

    num_lines: int = 0
    errors: list[BatchError] = field(default_factory=list)
    num_errors: int = 0

    def add(self, error: BatchError) -> None:
        """Counts an error, and keeps it if it is among the first ones."""
        self.num_errors += 1
        if len(self.errors) < _MAX_ERRORS:
            self.errors.append(error)


async def validate(read: Read, endpoint: str, max_lines: int = MAX_LINES) -> Validated:
    """Returns the number of lines, and the errors by line. Raises NotFound and Unavailable of `read`."""
    found, seen = Validated(), dict[bytes, int]()
    try:
        async for line in lines_of(read):
            found.num_lines = line.index + 1
            if found.num_lines > max_lines:
                raise LineProblem("too_many_tasks", f"the file has more than {max_lines} requests")
            _check(line, endpoint, seen, found)
    except LineProblem as problem:
        found.add(problem.at(None))
    if not found.num_lines and not found.errors:
        found.add(LineProblem("empty_batch", "the file has no requests").at(None))
    if found.num_errors > len(found.errors):
        found.errors[-1] = LineProblem(
            "too_many_errors", f"{found.num_errors - _MAX_ERRORS + 1} further lines have errors, which are not listed"
        ).at(None)
    return found


def _check(line: Line, endpoint: str, seen: dict[bytes, int], found: Validated) -> None:
    try:
        request = request_of(line.data, (endpoint,))
    except LineProblem as problem:
        found.add(problem.at(line.number))
        return
    # Digests bound the memory for long ids.
    digest = hashlib.blake2b(request.custom_id.encode(), digest_size=16).digest()
    first = seen.setdefault(digest, line.number)
    if first != line.number:
        message = f"custom_id {request.custom_id[:80]!r} is that of line {first} too; each must be used once"
        found.add(LineProblem("duplicate_custom_id", message, "custom_id").at(line.number))
