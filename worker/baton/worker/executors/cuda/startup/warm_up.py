"""The steps that a start runs, so that nothing is compiled, loaded or out of memory while requests run.

Their plans use rows from 0 on and only the first block.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from baton.worker.core import ReasoningLimit, Row, RowInit, SamplingParams, StepPlan, TokenMasks
from baton.worker.executors.cuda.sampling.prompt_logprobs import MAX_POSITIONS

# All filters and edits, and logprobs.
_SPECIAL = SamplingParams(
    temperature=0.7,
    top_p=0.9,
    top_k=20,
    min_p=0.01,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    repetition_penalty=1.1,
    logit_bias=((0, 0.5),),
    allowed_token_ids=(0, 1, 2, 3),
    logprobs=2,
    min_tokens=8,
    suppressed_token_ids=(1,),
    forbidden_sequences=((0, 1), (2,)),
    reasoning_limit=ReasoningLimit(1, (3,)),
)
_CHOSEN = replace(_SPECIAL, logprob_token_ids=(0, 1))
_PLAIN = SamplingParams(temperature=1.0, top_p=0.5)
# One for each split of the kernels for few tokens.
_DECODE_COUNTS = (1, 2, 17, 33, 65)


def largest_step(num_tokens: int, max_model_len: int, num_rows: int) -> StepPlan:
    """Returns a plan with prompts of num_tokens in total."""
    chunks: list[int] = []
    while num_tokens > 0 and len(chunks) < num_rows:
        # The last token of a row is never computed.
        chunks.append(min(num_tokens, max(1, max_model_len - 1)))
        num_tokens -= chunks[-1]
    return _plan([], chunks)


def small_steps(num_rows: int, vocab_size: int) -> list[StepPlan]:
    """Returns plans that use all specializations of kernels for this many rows, except splits of decode attention."""
    counts = [count for count in _DECODE_COUNTS if count < num_rows] + [num_rows]
    plans = [_plan([_PLAIN] * count, []) for count in counts]
    plans += [_plan([_PLAIN] * (count - 1), [2]) for count in counts]
    plans.append(_plan([], [1]))
    plans.append(_plan([_SPECIAL, _PLAIN, _CHOSEN][:num_rows], []))
    plans.append(_plan([_SPECIAL] * (num_rows - 1), [1]))
    plans += [_masked(_plan([params], []), vocab_size) for params in (_PLAIN, _SPECIAL)]
    return plans


def scoring_step(num_tokens: int, max_model_len: int) -> StepPlan:
    """Returns a plan with prompt log-probabilities of as many positions as a chunk of logits has."""
    plan = _plan([], [max(1, min(num_tokens, max_model_len - 1, MAX_POSITIONS + 1))])
    plan.admitted[0].sampling = replace(_PLAIN, prompt_logprobs=1)
    return plan


def _masked(plan: StepPlan, vocab_size: int) -> StepPlan:
    """Returns the plan with a mask for its first row that allows all tokens."""
    plan.masks = TokenMasks(np.zeros(1, np.int32), np.full((1, -(-vocab_size // 32)), -1, np.int32))
    return plan


def _plan(decodes: list[SamplingParams], chunks: list[int]) -> StepPlan:
    """Returns a plan of rows that decode their second token, followed by prompts of these lengths."""
    counts = [1] * len(decodes) + chunks
    sampling = [*decodes, *([_PLAIN] * len(chunks))]
    lengths = [2] * len(decodes) + chunks
    rows = np.arange(len(counts))
    return StepPlan(
        step=0,
        admitted=[
            RowInit(Row(row), np.zeros(length, np.int32), 1 if row < len(decodes) else length, params)
            for row, (length, params) in enumerate(zip(lengths, sampling, strict=True))
        ],
        rows=rows,
        num_scheduled_tokens=np.array(counts, np.int32),
        num_computed_tokens=(rows < len(decodes)).astype(np.int32),
        samples=np.ones(len(counts), np.bool_),
        num_decodes=len(decodes),
    )
