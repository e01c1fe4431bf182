"""Compares the output of streams with the expected one, and measures the gaps caused by faults. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_GAP_WINDOW = 1.0  # seconds after a fault within which its gap begins
_LOGPROB_TOLERANCE = 1e-3


@dataclass
class Heard:
    """One choice, as its pieces came."""

    text: str = ""
    calls: dict[int, str] = field(default_factory=dict)  # name and arguments, by the call's place
    logprobs: list[tuple[str, float]] = field(default_factory=list)
    finish: str = ""


@dataclass
class Seen:
    """One stream as its client saw it."""

    number: int  # of the request
    choices: dict[int, Heard] = field(default_factory=dict)
    usage: tuple[int, int] | None = None  # prompt and completion tokens
    times: list[float] = field(default_factory=list)  # of its events
    problem: str = ""
    num_resumes: int = 0  # at another gateway

    def take(self, chunk: Mapping[str, Any]) -> None:
        """One event's data."""
        if "error" in chunk:
            self.problem = str(chunk["error"].get("message"))
        for choice in chunk.get("choices", ()):
            heard = self.choices.setdefault(choice["index"], Heard())
            delta = choice["delta"]
            heard.text += delta.get("content") or ""
            heard.finish = choice["finish_reason"] or heard.finish
            for call in delta.get("tool_calls") or ():
                function = call.get("function", {})
                told = (function.get("name") or "") + (function.get("arguments") or "")
                heard.calls[call["index"]] = heard.calls.get(call["index"], "") + told
            for entry in (choice.get("logprobs") or {}).get("content") or ():
                heard.logprobs.append((entry["token"], entry["logprob"]))
        if usage := chunk.get("usage"):
            self.usage = usage["prompt_tokens"], usage["completion_tokens"]


def difference(seen: Seen, undisturbed: Seen) -> str:
    """What is not as it should be. Empty: nothing."""
    if seen.problem:
        return f"failed: {seen.problem}"
    if seen.choices.keys() != undisturbed.choices.keys():
        return f"choices {sorted(seen.choices)} instead of {sorted(undisturbed.choices)}"
    for index, heard in seen.choices.items():
        if problem := _choice_difference(heard, undisturbed.choices[index]):
            return f"choice {index}: {problem}"
    if seen.usage != undisturbed.usage:
        return f"usage {seen.usage} instead of {undisturbed.usage}"
    return ""


def _choice_difference(heard: Heard, expected: Heard) -> str:
    for name in ("text", "calls", "finish"):
        got, wanted = getattr(heard, name), getattr(expected, name)
        if got != wanted:
            return f"{name} is {_from_difference(str(got), str(wanted))}"
    if [token for token, _ in heard.logprobs] != [token for token, _ in expected.logprobs]:
        return "its log-probabilities are of other tokens"
    for (token, got), (_, wanted) in zip(heard.logprobs, expected.logprobs, strict=True):
        if not math.isclose(got, wanted, abs_tol=_LOGPROB_TOLERANCE):
            return f"the log-probability of {token!r} is {got}, not {wanted}"
    return ""


def _from_difference(got: str, wanted: str) -> str:
    at = next((i for i, (one, other) in enumerate(zip(got, wanted, strict=False)) if one != other), len(wanted))
    start = max(0, at - 10)
    return f"...{got[start : at + 20]!r} instead of ...{wanted[start : at + 20]!r} at {at} of {len(wanted)}"


def gap_at(times: Sequence[float], fault_at: float) -> float | None:
    """The longest wait that began or lasted around the fault; None: the stream did not run then."""
    if not times or not times[0] < fault_at < times[-1]:
        return None
    pairs = itertools.pairwise(times)
    return max(
        (late - early for early, late in pairs if late > fault_at and early < fault_at + _GAP_WINDOW), default=None
    )


def gaps_of(streams: Iterable[Seen], fault_at: float) -> list[float]:
    """Of all streams that ran at the fault, the longest first."""
    return sorted((gap for seen in streams if (gap := gap_at(seen.times, fault_at)) is not None), reverse=True)


def percentile(values: Iterable[float], part: float) -> float:
    """nan for none."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, math.ceil(part * len(ranked)) - 1)] if ranked else math.nan
