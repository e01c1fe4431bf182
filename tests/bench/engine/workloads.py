"""Offline workloads, written as `requests x in/out`, and the published rows that engines are compared on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

_PROMPT = r"(?:(\d+)|\(\s*(\d+)\s*(?:shared)?\s*\+\s*(\d+)\s*\))"
_FORM = re.compile(rf"(\d+)\s*x\s*{_PROMPT}\s*/\s*(\d+)(?:\s*~\s*(\d+(?:\.\d+)?))?")
_LIMIT = 1 << 20
_LONGEST = 4  # medians


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that all arrive at the start."""

    num_requests: int
    num_own: int  # prompt tokens that are different in each request
    num_output: int
    num_shared: int = 0  # prompt tokens that all requests begin with
    spread: float = 0.0  # of log-normal lengths, whose medians are num_own and num_output; 0: all are equal

    @classmethod
    def parse(cls, text: str) -> Workload:
        """Parses 256x512/256, 256x(4096+64)/32 with 4096 shared tokens, or 256x512/256~0.9 with a spread of lengths.

        Raises ValueError.
        """
        match = _FORM.fullmatch(text.strip())
        if match is None:
            raise ValueError(
                f"{text!r} is no workload: write REQUESTSxIN/OUT or REQUESTSx(SHARED+OWN)/OUT, and ~SPREAD behind it"
            )
        count, plain, shared, own, output = (int(group or 0) for group in match.groups()[:5])
        workload = cls(count, plain or own, output, shared, float(match[6] or 0))
        for name in ("num_requests", "num_own", "num_output"):
            if not 1 <= getattr(workload, name) <= _LIMIT:
                raise ValueError(f"{text!r}: {name} must be 1 to {_LIMIT}")
        return workload

    @property
    def num_prompt(self) -> int:
        """Prompt tokens of one request."""
        return self.num_shared + self.num_own

    @property
    def num_total(self) -> int:
        """Tokens of the longest request."""
        longest = _LONGEST if self.spread else 1
        return self.num_shared + longest * (self.num_own + self.num_output)

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """Own prompt tokens and output tokens of each request; the same ones every time."""
        if not self.spread:
            return [(self.num_own, self.num_output)] * self.num_requests
        factors = np.random.default_rng(0).lognormal(0.0, self.spread, (self.num_requests, 2)).clip(0, _LONGEST)
        lengths = np.maximum(1, factors * (self.num_own, self.num_output)).astype(int)
        return [(own, output) for own, output in lengths.tolist()]

    @property
    def all_prompts(self) -> int:
        """Prompt tokens of all requests."""
        return sum(self.num_shared + own for own, _ in self.lengths)

    @property
    def all_outputs(self) -> int:
        """Output tokens of all requests."""
        return sum(output for _, output in self.lengths)

    def __str__(self) -> str:
        prompt = f"({self.num_shared} shared + {self.num_own})" if self.num_shared else str(self.num_own)
        return f"{self.num_requests} x {prompt}/{self.num_output}" + (f" ~ {self.spread:g}" if self.spread else "")


# vLLM 0.26.0 offline on one H200, 2026-11-21: bf16 dummy weights, CUDA graphs, torch.compile, prefix caching, greedy,
# ignore_eos, no detokenizing. Seconds. The shared prefix is computed within the time (2026-11-24); None: not measured.
VLLM = "vLLM 0.26.0 on one NVIDIA H200, 2026-11-21"
VLLM_SECONDS: Mapping[str, Mapping[Workload, float | None]] = {
    "llama-3.1-8b": {
        Workload(1, 128, 256): 1.245,
        Workload(16, 512, 256): 1.541,
        Workload(64, 512, 256): 2.444,
        Workload(256, 512, 256): 6.702,
        Workload(512, 1024, 256): 21.14,
        Workload(16, 8192, 1): 3.428,
        Workload(1, 8192, 1): 0.211,
        Workload(256, 64, 32, num_shared=4096): 1.863,
    },
    "qwen3-30b-a3b": {
        Workload(1, 128, 256): 0.991,
        Workload(64, 512, 256): 5.088,
        Workload(256, 512, 256): 7.880,
        Workload(16, 4096, 1): 1.034,
    },
    # FP8 in blocks without a tuned table; best of two.
    "qwen3-30b-a3b-fp8": {
        Workload(1, 128, 256): 1.103,
        Workload(64, 512, 256): 2.033,
        Workload(256, 512, 256): 4.557,
        Workload(16, 4096, 1): 0.840,
    },
    "gpt-oss-20b-mxfp4": {
        Workload(1, 128, 256): 0.732,
        Workload(64, 512, 256): None,
    },
    "qwen3-0.6b": {
        Workload(1, 128, 256): 0.387,
        Workload(64, 256, 256): 0.677,
        Workload(256, 256, 256): 1.546,
        Workload(1024, 256, 256): 7.124,
        Workload(32, 4096, 1): 0.381,
        Workload(256, 64, 32, num_shared=4096): None,
    },
}
TABLES: Mapping[str, tuple[str, ...]] = {
    "8b": ("llama-3.1-8b",),
    "0.6b": ("qwen3-0.6b",),
    "30b-a3b": ("qwen3-30b-a3b",),
    "30b-a3b-fp8": ("qwen3-30b-a3b-fp8",),
    "gpt-oss-mxfp4": ("gpt-oss-20b-mxfp4",),
    "all": ("llama-3.1-8b", "qwen3-0.6b"),
}


def vllm_seconds(model: str, workload: Workload) -> float | None:
    """Returns vLLM's time for the row; None if it was not measured."""
    return VLLM_SECONDS.get(model, {}).get(workload)
