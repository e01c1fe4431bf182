"""Sampling parameters of the benchmarks, in addition to greedy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from baton.worker.core import SamplingParams

Sampling = Callable[[int], SamplingParams]  # of the request's number, from 0

GREEDY = SamplingParams(temperature=0.0)
_WARM = SamplingParams(temperature=0.7)
_QWEN = replace(_WARM, top_k=20, top_p=0.8)  # Qwen2.5's generation_config.json without its repetition penalty
_QWEN_REPETITION = replace(_QWEN, repetition_penalty=1.05)
_PENALTIES = replace(_WARM, presence_penalty=0.5, frequency_penalty=0.5)
_PENALTIES_TOP_P = replace(_PENALTIES, top_p=0.95)
_BIASES = replace(_WARM, logit_bias=((100, 5.0), (200, -5.0), (300, 1.0)))
_LOGPROBS = replace(GREEDY, logprobs=5)
_MIXED = (
    GREEDY,
    _WARM,
    _QWEN_REPETITION,
    _PENALTIES,
    _BIASES,
    _LOGPROBS,
    replace(_WARM, top_p=0.95, logprobs=2),
    replace(_WARM, min_p=0.05, min_tokens=16, suppressed_token_ids=(1, 2)),
    replace(_QWEN, forbidden_sequences=((5, 6), (7,))),
)


def _all(sampling: SamplingParams) -> Sampling:
    return lambda number: replace(sampling, seed=number)


SAMPLINGS: Mapping[str, Sampling] = {
    "greedy": _all(GREEDY),
    "temperature": _all(_WARM),
    "top_p": _all(replace(_WARM, top_p=0.95)),
    "qwen": _all(_QWEN),
    "qwen_rep": _all(_QWEN_REPETITION),
    "penalties": _all(_PENALTIES),
    "penalties_top_p": _all(_PENALTIES_TOP_P),
    "bias3": _all(_BIASES),
    "logprobs5": _all(_LOGPROBS),
    "mixed": lambda number: replace(_MIXED[number % len(_MIXED)], seed=number),
}
