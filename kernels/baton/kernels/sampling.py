"""Draws a token a row by Gumbel-max, without the host: reference.sampling on the device, bit-equal in its noise.

A row's filters become bounds on its logits, found by bisection over their ordered bits; the draw is then one argmax of
logit / temperature + noise over what passes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baton.kernels.overlap import overlaps

_PART = 4096  # tokens a program of the draw looks at
_SCAN = 8192  # tokens a step of the bisection looks at
_ALIGNMENT = 64  # words: columns begin where an allocation might


@triton.jit
def _ordered_bits(logits, BITS: tl.constexpr):
    """Integers in the order of the floats."""
    if BITS == 16:
        bits = logits.to(tl.int16, bitcast=True).to(tl.int64) & 0xFFFF
    else:
        bits = logits.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    sign: tl.constexpr = 1 << (BITS - 1)
    return tl.where(bits >= sign, 2 * sign - 1 - bits, bits + sign)


@triton.jit(do_not_specialize_on_alignment=["batch_rows_ptr"])
def _bounds_kernel(
    key_bound_ptr,  # [num_rows] int64: the least ordered bits that may be drawn
    value_bound_ptr,  # [num_rows] fp32: the least logit / temperature that may be drawn
    logits_ptr,  # [num_rows, logits_stride]
    batch_rows_ptr,  # [num_rows] int32, into the parameters; -1 is padding
    temperature_ptr,  # [batch_rows] fp32
    top_k_ptr,  # [batch_rows] int32
    top_p_ptr,  # [batch_rows] fp32
    min_p_ptr,  # [batch_rows] fp32
    logits_stride,
    vocab_size,
    BITS: tl.constexpr,
    SCAN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """k-th largest by count(bits > b) < k; then the nucleus by mass(bits > b) < top_p * mass(of the k largest)"""
    # grid: (num_rows)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    batch_row = tl.load(batch_rows_ptr + row)
    tl.store(key_bound_ptr + row, 0)
    tl.store(value_bound_ptr + row, float("-inf"))
    if batch_row < 0:
        return
    temperature = tl.load(temperature_ptr + batch_row)
    top_k = tl.load(top_k_ptr + batch_row)
    top_p = tl.load(top_p_ptr + batch_row)
    min_p = tl.load(min_p_ptr + batch_row)
    if (temperature == 0) | ((top_k == 0) & (top_p >= 1) & (min_p == 0)):
        return
    base = logits_ptr + row * logits_stride
    index = tl.arange(0, SCAN)
    top = float("-inf")
    for start in range(0, vocab_size, SCAN):
        inside = start + index < vocab_size
        logits = tl.load(base + start + index, mask=inside, other=float("-inf"))
        top = tl.maximum(top, tl.max(logits.to(tl.float32), 0))
    if min_p > 0:
        tl.store(value_bound_ptr + row, top / temperature + tl.log(min_p))
    bound = tl.zeros([], tl.int64)
    if top_k > 0:
        low = tl.zeros([], tl.int64)
        for bit in range(BITS):
            # The largest `low` with at least top_k tokens at or above it.
            probe = low + (tl.full([], 1, tl.int64) << (BITS - 1 - bit))
            count = 0
            for start in range(0, vocab_size, SCAN):
                inside = start + index < vocab_size
                logits = tl.load(base + start + index, mask=inside, other=float("-inf"))
                count += tl.sum((inside & (_ordered_bits(logits, BITS) >= probe)).to(tl.int32), 0)
            low = tl.where(count >= top_k, probe, low)
        bound = low
    if top_p < 1:
        total = 0.0
        for start in range(0, vocab_size, SCAN):
            inside = start + index < vocab_size
            logits = tl.load(base + start + index, mask=inside, other=float("-inf"))
            passes = inside & (_ordered_bits(logits, BITS) >= bound)
            total += tl.sum(tl.where(passes, tl.exp((logits.to(tl.float32) - top) / temperature), 0.0), 0)
        low = tl.zeros([], tl.int64)
        for bit in range(BITS):
            # The largest `low` at which the tokens at or above it weigh top_p: the last one that is needed.
            probe = low + (tl.full([], 1, tl.int64) << (BITS - 1 - bit))
            mass = 0.0
            for start in range(0, vocab_size, SCAN):
                inside = start + index < vocab_size
                logits = tl.load(base + start + index, mask=inside, other=float("-inf"))
                passes = inside & (_ordered_bits(logits, BITS) >= probe)
                mass += tl.sum(tl.where(passes, tl.exp((logits.to(tl.float32) - top) / temperature), 0.0), 0)
            low = tl.where(mass >= top_p * total, probe, low)
        bound = tl.maximum(bound, low)
    tl.store(key_bound_ptr + row, bound)


@triton.jit(do_not_specialize_on_alignment=["batch_rows_ptr", "seq_lens_ptr"])
def _draw_kernel(
    best_ptr,  # [num_rows, num_parts] fp32
    index_ptr,  # [num_rows, num_parts] int32
    logits_ptr,  # [num_rows, logits_stride]
    key_bound_ptr,  # [num_rows] int64
    value_bound_ptr,  # [num_rows] fp32
    batch_rows_ptr,  # [num_rows] int32; -1 is padding
    seq_lens_ptr,  # [num_rows] int32
    temperature_ptr,  # [batch_rows] fp32
    seed_ptr,  # [batch_rows] int64
    num_prompt_tokens_ptr,  # [batch_rows] int32
    logits_stride,
    vocab_size,
    num_parts,
    BITS: tl.constexpr,
    PART: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """argmax of logit / temperature - log(-log u); of the logit itself where the temperature is 0"""
    # grid: (num_parts, num_rows)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    batch_row = tl.load(batch_rows_ptr + row)
    if batch_row < 0:
        return
    index = part * PART + tl.arange(0, PART)
    inside = index < vocab_size
    raw = tl.load(logits_ptr + row * logits_stride + index, mask=inside, other=float("-inf"))
    score = raw.to(tl.float32)
    temperature = tl.load(temperature_ptr + batch_row)
    if temperature > 0:
        seed = tl.load(seed_ptr + batch_row)
        position = tl.load(seq_lens_ptr + row) - tl.load(num_prompt_tokens_ptr + batch_row)
        counter = (part * (PART // 4) + tl.arange(0, PART // 4)).to(tl.uint32)
        zero = tl.zeros([PART // 4], tl.uint32)
        w0, w1, w2, w3 = tl.philox(seed, counter, zero + position.to(tl.uint32), zero, zero)
        # Token t takes word t % 4 of counter t // 4.
        words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [PART])
        complement = (words.to(tl.float32) + 0.5) * 2.3283064365386963e-10
        complement = tl.minimum(complement, 1.0 - 5.9604644775390625e-08)
        score = score / temperature
        allowed = (_ordered_bits(raw, BITS) >= tl.load(key_bound_ptr + row)) & (score >= tl.load(value_bound_ptr + row))
        score = tl.where(allowed, score - tl.log(-_log1p(-complement)), float("-inf"))
    score = tl.where(inside, score, float("-inf"))
    top = tl.max(score, 0)
    tl.store(best_ptr + row * num_parts + part, top)
    tl.store(index_ptr + row * num_parts + part, tl.min(tl.where(score == top, index, 2147483647), 0))


@triton.jit
def _log1p(x):
    """log(1 + x) with x's full precision near 0 (Kahan): u = 1 + x; log(u) * x / (u - 1)"""
    u = 1.0 + x
    return tl.where(u == 1.0, x, tl.log(u) * (x / tl.where(u == 1.0, 1.0, u - 1.0)))


@triton.jit(do_not_specialize_on_alignment=["out_ptr", "batch_rows_ptr", "seq_lens_ptr"])
def _choose_kernel(
    out_ptr,  # [num_rows] int32
    token_ids_ptr,  # [batch_rows, tokens_stride] int32
    best_ptr,  # [num_rows, num_parts] fp32
    index_ptr,  # [num_rows, num_parts] int32
    batch_rows_ptr,  # [num_rows] int32; -1 is padding
    seq_lens_ptr,  # [num_rows] int32
    tokens_stride,
    num_parts,
    PARTS_PAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The best of all parts, also as the next of its row's known tokens: token_ids[row, seq_len]"""
    # grid: (num_rows)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    batch_row = tl.load(batch_rows_ptr + row).to(tl.int64)
    parts = tl.arange(0, PARTS_PAD)
    live = (parts < num_parts) & (batch_row >= 0)
    best = tl.load(best_ptr + row * num_parts + parts, mask=live, other=float("-inf"))
    index = tl.load(index_ptr + row * num_parts + parts, mask=live, other=0)
    token = tl.min(tl.where(best == tl.max(best, 0), index, 2147483647), 0)
    # Logits that are all NaN compare to nothing: such a row gets token 0.
    token = tl.where(token == 2147483647, 0, token)
    tl.store(out_ptr + row, token)
    seq_len = tl.load(seq_lens_ptr + row)
    tl.store(
        token_ids_ptr + batch_row * tokens_stride + seq_len, token, mask=(batch_row >= 0) & (seq_len < tokens_stride)
    )


class SamplingColumns:
    """Sampling parameters and scratch memory, a row of the persistent batch each.

    The parameters are all parts of `words`, so that many can be written at once.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        stride = triton.cdiv(num_rows, _ALIGNMENT) * _ALIGNMENT
        self.words = torch.zeros(7 * stride, dtype=torch.int32, device=device)
        columns = self.words.view(7, stride)
        self.temperature = columns[0, :num_rows].view(torch.float32)
        self.top_p = columns[1, :num_rows].view(torch.float32).fill_(1.0)
        self.min_p = columns[2, :num_rows].view(torch.float32)
        self.top_k = columns[3, :num_rows]
        self.num_prompt_tokens = columns[4, :num_rows]
        self.seed = self.words[5 * stride :].view(torch.int64)[:num_rows]
        self.num_parts = triton.cdiv(vocab_size, _PART)
        self.best = torch.empty(num_rows * self.num_parts, dtype=torch.float32, device=device)
        self.index = torch.empty(num_rows * self.num_parts, dtype=torch.int32, device=device)
        self.key_bound = torch.empty(num_rows, dtype=torch.int64, device=device)
        self.value_bound = torch.empty(num_rows, dtype=torch.float32, device=device)
        # Of temperature, top_p, min_p, top_k, num_prompt_tokens, and the seed's low and high half: where row 0's is in
        # `words`, and how far it is to the next row's.
        self.first_words = (*range(0, 5 * stride, stride), 5 * stride, 5 * stride + 1)
        self.word_steps = (1, 1, 1, 1, 1, 2, 2)


def sample_tokens(
    logits: Tensor, out: Tensor, columns: SamplingColumns, batch_rows: Tensor, seq_lens: Tensor, token_ids: Tensor
) -> None:
    """out [num_rows] int32 for logits [num_rows, vocab_size] bf16, fp16 or fp32, each by its own parameters.

    batch_rows [num_rows] int32 says which columns (and row of token_ids [batch_rows, max_model_len]) each has, -1 is
    padding; seq_lens [num_rows] int32 counts the tokens that the logits follow: where the drawn one is also written.
    """
    num_rows, vocab_size = logits.shape
    bits = logits.element_size() * 8
    overlap = overlaps(logits)
    _bounds_kernel[(num_rows,)](
        columns.key_bound,
        columns.value_bound,
        logits,
        batch_rows,
        columns.temperature,
        columns.top_k,
        columns.top_p,
        columns.min_p,
        logits.stride(0),
        vocab_size,
        BITS=bits,
        SCAN=_SCAN,
        num_warps=16,
        OVERLAP=overlap,
        launch_pdl=overlap,
    )
    _draw_kernel[(columns.num_parts, num_rows)](
        columns.best,
        columns.index,
        logits,
        columns.key_bound,
        columns.value_bound,
        batch_rows,
        seq_lens,
        columns.temperature,
        columns.seed,
        columns.num_prompt_tokens,
        logits.stride(0),
        vocab_size,
        columns.num_parts,
        BITS=bits,
        PART=_PART,
        num_warps=8,
        OVERLAP=overlap,
        launch_pdl=overlap,
    )
    _choose_kernel[(num_rows,)](
        out,
        token_ids,
        columns.best,
        columns.index,
        batch_rows,
        seq_lens,
        token_ids.stride(0),
        columns.num_parts,
        PARTS_PAD=triton.next_power_of_2(columns.num_parts),
        num_warps=1,
        OVERLAP=overlap,
        launch_pdl=overlap,
    )
