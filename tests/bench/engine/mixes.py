"""Realistic mixes of requests: varied lengths, sampling, some schemas, random arrivals. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from bench.engine.sampling import SAMPLINGS

from baton.worker.core import Constraint, ConstraintForm, Request, StopConditions

_NAMESPACE = b"baton bench mix "
_FIRST_TOKEN_ID = 5  # lower ones are special in most vocabularies
_TOOL = {
    "type": "object",
    "properties": {
        "name": {"enum": ["search", "read_file", "run_tests"]},
        "arguments": {
            "type": "object",
            "properties": {
                "query": {"type": "string", "maxLength": 200},
                "limit": {"type": "integer", "minimum": 1, "maximum": 100},
                "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{1,12}$"}, "maxItems": 5},
            },
            "required": ["query", "limit", "tags"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "arguments"],
    "additionalProperties": False,
}
# Longer than any answer, so that every row stays in the batch to its end.
_TOOLS = json.dumps({"type": "array", "items": _TOOL, "minItems": 100_000})


@dataclass(frozen=True, slots=True)
class Mix:
    """A distribution of requests. Lengths are log-normal around their medians, or equal if the spread is 0."""

    name: str
    num_requests: int
    prompt: int  # tokens, the median
    output: int
    spread: float = 0.0
    longest: int = 1 << 20  # of a prompt and of an output
    sampling: str = "qwen_rep"  # of SAMPLINGS
    load: float | None = None  # arrivals, as a share of the engine's capacity; None: all at once
    constrained: float = 0.0  # share of requests with a schema
    num_blocks: int | None = None  # KV blocks for the engine; None: all


MIXES: Sequence[Mix] = (
    Mix("long-tailed, all at once", 512, 256, 128, 0.9, 2048),
    Mix("long-tailed, 50 % of that", 256, 256, 128, 0.9, 2048, load=0.5),
    Mix("long-tailed, 80 %", 400, 256, 128, 0.9, 2048, load=0.8),
    Mix("long-tailed, 95 %", 480, 256, 128, 0.9, 2048, load=0.95),
    Mix("half of 128 under a tool's schema", 128, 256, 256, constrained=0.5),
    Mix("the same without schemas", 128, 256, 256),
    Mix("decode behind 32 k", 4, 32_000, 256),
    Mix("decode behind 128 k", 1, 128_000, 128),
    Mix("256 in KV for about 96", 256, 256, 256, num_blocks=3072),
    Mix("one token each", 1000, 128, 1),
)


@dataclass(slots=True)
class Arrivals:
    """Requests, and the arrival of each in seconds from the start."""

    requests: list[Request] = field(default_factory=list)
    times: list[float] = field(default_factory=list)


def arrivals(mix: Mix, vocab_size: int, requests_per_second: float, seed: int) -> Arrivals:
    """Returns arrivals. `requests_per_second` is the engine's capacity. Equal seeds give equal requests."""
    random = np.random.default_rng(seed)
    made = Arrivals()
    at = 0.0
    for number in range(mix.num_requests):
        prompt, output = _length(random, mix.prompt, mix), _length(random, mix.output, mix)
        made.requests.append(
            _request(mix, number, random.integers(_FIRST_TOKEN_ID, vocab_size, prompt).tolist(), output)
        )
        made.times.append(at)
        if mix.load is not None:
            at += random.exponential(1 / (mix.load * requests_per_second))
    return made


def _length(random: np.random.Generator, median: int, mix: Mix) -> int:
    if not mix.spread:
        return median
    return int(np.clip(round(median * random.lognormal(0.0, mix.spread)), 4, mix.longest))


def _request(mix: Mix, number: int, prompt: list[int], output: int) -> Request:
    every = 1 / mix.constrained if mix.constrained else 0
    constrained = bool(every) and number % every < 1
    return Request(
        request_id=f"{mix.name}-{number}",
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        sampling=SAMPLINGS[mix.sampling](number),
        stop=StopConditions(max_tokens=output),
        cache_namespace=_NAMESPACE,
        constraint=Constraint(ConstraintForm.JSON_SCHEMA, _TOOLS) if constrained else None,
    )


@dataclass(slots=True)
class Timings:
    """The arrival of each request, and the times of its tokens."""

    arrived: dict[str, float] = field(default_factory=dict)
    _last: dict[str, float] = field(default_factory=dict)
    to_first: list[float] = field(default_factory=list)  # seconds
    between: list[float] = field(default_factory=list)

    def token(self, request_id: str, now: float) -> None:
        """Records a token of a request."""
        last = self._last.get(request_id)
        if last is None:
            self.to_first.append(now - self.arrived[request_id])
        else:
            self.between.append(now - last)
        self._last[request_id] = now

    def summary(self) -> Mapping[str, float]:
        """Returns milliseconds; 0 for ITL if no request had two tokens."""
        found = {}
        for name, values in (("ttft", self.to_first), ("itl", self.between)):
            for share in (50, 99):
                found[f"{name}_p{share}"] = 1000 * float(np.percentile(values, share)) if values else 0.0
        return found
