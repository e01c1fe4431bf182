"""Reads tiles of packed weights. Shared by the kernels of all formats."""

from __future__ import annotations

import triton
import triton.language as tl

from baton.kernels.packed.tables import looked_up

_ONES: tl.constexpr = tl.constexpr(0x4B000000)  # the bits of 2^23, whose last bits are an integer's
_OFFSET: tl.constexpr = tl.constexpr(8388608.0)


@triton.jit
def load_stored(
    stored_ptr,
    first,
    start,
    n,
    K: tl.constexpr,
    NUMBERS: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Returns what is stored of rows from `first` on and columns from `start` on."""
    per: tl.constexpr = 1 if NUMBERS == "e4m3" or NUMBERS == "bytes" else 32 // BITS
    rows = first + tl.arange(0, BLOCK_N)
    columns = start // per + tl.arange(0, BLOCK_K // per)
    inside = (rows < n)[:, None] & (columns < K // per)[None, :]
    at = rows.to(tl.int64)[:, None] * (K // per) + columns[None, :]
    return tl.load(stored_ptr + at, mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def numbers_of(stored, NUMBERS: tl.constexpr, BITS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Returns the stored numbers [BLOCK_N, BLOCK_K] fp32, which `_less` corrects if they are of words."""
    if NUMBERS == "e4m3":
        if stored.dtype == tl.uint8:
            # As float16, whose exponents are 8 larger.
            wide = stored.to(tl.int32)
            halves = ((wide & 0x7F) << 7 | (wide & 0x80) << 8).to(tl.int16)
            numbers = halves.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        else:
            numbers = stored.to(tl.float32)
    elif NUMBERS == "bytes":
        numbers = stored.to(tl.float32)
    elif NUMBERS == "nf4" or NUMBERS == "fp4":
        numbers = tl.reshape(looked_up(stored, NUMBERS), [BLOCK_N, BLOCK_K])
    elif BITS == 4:
        first, second, third, fourth = _four_pairs(stored, NUMBERS)
        numbers = tl.join(tl.join(_halves(first), _halves(third)), tl.join(_halves(second), _halves(fourth)))
        numbers = tl.reshape(numbers, [BLOCK_N, BLOCK_K])
    else:
        parts = tl.join(stored, stored >> 16)
        parts = tl.join(parts, parts >> 8)
        if BITS == 2:
            parts = tl.join(parts, parts >> 4)
            parts = tl.join(parts, parts >> 2)
        numbers = tl.reshape(_floats(parts, BITS), [BLOCK_N, BLOCK_K])
    return numbers


@triton.jit
def _four_pairs(words, NUMBERS: tl.constexpr):
    """Returns the numbers n and n + 4 of each word as float16 in both halves of a word, for n = 0, 1, 2, 3."""
    if NUMBERS == "e2m1":
        # Exponents are 14 smaller; `scales_of` multiplies the scales.
        return (
            ((words << 12) & -0x7FFF8000) | ((words << 9) & 0x0E000E00),
            ((words << 8) & -0x7FFF8000) | ((words << 5) & 0x0E000E00),
            ((words << 4) & -0x7FFF8000) | ((words << 1) & 0x0E000E00),
            (words & -0x7FFF8000) | ((words >> 3) & 0x0E000E00),
        )
    else:  # noqa: RET505 - only one branch is compiled
        return (  # plus 16
            ((words << 6) & 0x03C003C0) | 0x4C004C00,
            ((words << 2) & 0x03C003C0) | 0x4C004C00,
            ((words >> 2) & 0x03C003C0) | 0x4C004C00,
            ((words >> 6) & 0x03C003C0) | 0x4C004C00,
        )


@triton.jit
def _halves(words):
    """Returns both float16 of words as fp32."""
    return tl.join(_first_half(words), _first_half(words >> 16))


@triton.jit
def _first_half(words):
    return words.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _sums_of_words(words, x, NUMBERS: tl.constexpr, BLOCK_N: tl.constexpr, UNITS: tl.constexpr, UNIT: tl.constexpr):
    """Returns the sums of numbers of 4 bits, as `_four_pairs` has them, times x over each unit [BLOCK_N, UNITS]."""
    words = tl.reshape(words, [BLOCK_N, UNITS, UNIT // 8])
    even, odd = tl.split(tl.reshape(x, [UNITS, UNIT // 8, 2, 2, 2]))
    x04, x26 = tl.split(even)
    x15, x37 = tl.split(odd)
    first, second, third, fourth = _four_pairs(words, NUMBERS)
    sums = _pair_sums(tl.zeros([BLOCK_N, UNITS, UNIT // 8], tl.float32), first, x04)
    sums = _pair_sums(sums, second, x15)
    sums = _pair_sums(sums, third, x26)
    return tl.sum(_pair_sums(sums, fourth, x37), 2)


@triton.jit
def _pair_sums(sums, pair, x):
    """Returns sums plus both float16 of a pair times x."""
    first, second = tl.split(x)
    return sums + _first_half(pair) * first[None] + _first_half(pair >> 16) * second[None]


@triton.jit
def _floats(words, BITS: tl.constexpr):
    """Returns the last bits of words as fp32, plus 2^23."""
    mask: tl.constexpr = (1 << BITS) - 1
    return (words & mask | _ONES).to(tl.float32, bitcast=True)


@triton.jit
def _less(numbers, zero, NUMBERS: tl.constexpr, BITS: tl.constexpr):
    """Returns the numbers less their zeros, and less what `numbers_of` has added."""
    if NUMBERS == "words" and BITS == 4:
        zero += 16.0
    elif NUMBERS == "words":
        numbers -= _OFFSET  # beside which a zero would lose its fraction
    return numbers - zero


@triton.jit
def units_of(start, K: tl.constexpr, GROUP: tl.constexpr, UNITS: tl.constexpr, UNIT: tl.constexpr):
    """Returns the group of each unit of columns [UNITS], and whether it is within K."""
    columns = start + tl.arange(0, UNITS) * UNIT
    inside = columns < K
    group = columns * 0 if GROUP == 0 else columns // GROUP
    return group, inside


@triton.jit
def places_of(order_ptr, columns, K: tl.constexpr, ORDERED: tl.constexpr):
    """Returns where columns find what they are multiplied with in a row of x."""
    return tl.load(order_ptr + columns, mask=columns < K, other=0) if ORDERED else columns


@triton.jit
def scales_of(
    scale_ptr, rows, group, inside, NUM_GROUPS: tl.constexpr, SCALE_ROWS: tl.constexpr, NUMBERS: tl.constexpr
):
    """Returns the scales [rows, units] fp32."""
    at = (rows // SCALE_ROWS).to(tl.int64)[:, None] * NUM_GROUPS + group[None, :]
    stored = tl.load(scale_ptr + at, mask=inside, other=0.0)
    if stored.dtype == tl.uint8:
        scale = (stored.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    else:
        scale = stored.to(tl.float32)
    if NUMBERS == "e2m1":
        scale *= 16384.0
    return scale


@triton.jit
def zeros_of(
    zero_ptr,
    rows,
    group,
    inside,
    NUM_GROUPS: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    NUMBERS: tl.constexpr,
    BITS: tl.constexpr,
    ZERO_PLUS: tl.constexpr,
):
    """Returns the zeros [rows, units] fp32."""
    if NUMBERS == "bytes" or zero_ptr.dtype.element_ty.is_floating():
        at = (rows // SCALE_ROWS).to(tl.int64)[:, None] * NUM_GROUPS + group[None, :]
        zero = tl.load(zero_ptr + at, mask=inside, other=0)
    else:
        per: tl.constexpr = 32 // BITS
        at = (rows // per).to(tl.int64)[:, None] * NUM_GROUPS + group[None, :]
        place = rows % per
        words = tl.load(zero_ptr + at, mask=inside, other=0)
        zero = ((words >> (place * BITS)[:, None]) + ZERO_PLUS) & ((1 << BITS) - 1)
    return zero.to(tl.float32)


@triton.jit
def tile_of(
    stored,
    scale_ptr,
    zero_ptr,
    first,
    start,
    n,
    K: tl.constexpr,
    NUMBERS: tl.constexpr,
    BITS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALED: tl.constexpr,
    ZEROED: tl.constexpr,
    ZERO_PLUS: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Returns the weights [BLOCK_N, BLOCK_K] fp32 and scales [BLOCK_N, 1], which are still to be multiplied."""
    units: tl.constexpr = BLOCK_K // UNIT
    rows = first + tl.arange(0, BLOCK_N)
    group, within = units_of(start, K, GROUP, units, UNIT)
    inside = (rows < n)[:, None] & within[None, :]
    tile = numbers_of(stored, NUMBERS, BITS, BLOCK_N, BLOCK_K)
    if ZEROED:
        zero = zeros_of(zero_ptr, rows, group, inside, NUM_GROUPS, SCALE_ROWS, NUMBERS, BITS, ZERO_PLUS)
        tile = _less(tile, _spread(zero, BLOCK_N, BLOCK_K, UNIT), NUMBERS, BITS)
    elif NUMBERS == "words":
        tile = _less(tile, 1 << (BITS - 1), NUMBERS, BITS)
    scale = tl.full([BLOCK_N, 1], 1.0, tl.float32)
    if SCALED:
        scales = scales_of(scale_ptr, rows, group, inside, NUM_GROUPS, SCALE_ROWS, NUMBERS)
        if units == 1:
            scale = scales
        else:
            tile *= _spread(scales, BLOCK_N, BLOCK_K, UNIT)
    return tile, scale


@triton.jit
def times(
    acc,
    x,
    stored_ptr,
    scale_ptr,
    zero_ptr,
    first,
    start,
    n,
    K: tl.constexpr,
    NUMBERS: tl.constexpr,
    BITS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALED: tl.constexpr,
    ZEROED: tl.constexpr,
    ZERO_PLUS: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Returns acc + w x, of the weights' rows from `first` on and columns from `start` on."""
    if NUMBERS == "plain":
        # Rows beyond the end read the last one, because a load without a mask is faster.
        rows = tl.minimum(first + tl.arange(0, BLOCK_N), n - 1)
        row_ptr = stored_ptr + rows[:, None] * K + tl.arange(0, BLOCK_K)[None, :]
        acc = tl.dot(tl.load(row_ptr + start), x, acc, input_precision="ieee")
    else:
        stored = load_stored(stored_ptr, first, start, n, K, NUMBERS, BITS, BLOCK_N, BLOCK_K)
        tile, scale = tile_of(
            stored, scale_ptr, zero_ptr, first, start, n, K, NUMBERS, BITS, NUM_GROUPS, GROUP, SCALE_ROWS,
            SCALED, ZEROED, ZERO_PLUS, UNIT, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        if SCALED and UNIT == BLOCK_K:
            acc += tl.dot(tile.to(x.dtype), x, input_precision="ieee") * scale
        else:
            acc = tl.dot(tile.to(x.dtype), x, acc, input_precision="ieee")
    return acc


@triton.jit
def sums_of(
    stored,
    x,
    scale_ptr,
    zero_ptr,
    first,
    start,
    n,
    K: tl.constexpr,
    NUMBERS: tl.constexpr,
    BITS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALED: tl.constexpr,
    ZEROED: tl.constexpr,
    ZERO_PLUS: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Returns the sums of w x over each unit of columns [BLOCK_N, BLOCK_K / UNIT], for x [BLOCK_K / UNIT, UNIT]."""
    units: tl.constexpr = BLOCK_K // UNIT
    rows = first + tl.arange(0, BLOCK_N)
    group, within = units_of(start, K, GROUP, units, UNIT)
    inside = (rows < n)[:, None] & within[None, :]
    if (NUMBERS == "words" or NUMBERS == "e2m1") and BITS == 4 and UNIT >= 8:
        sums = _sums_of_words(stored, x, NUMBERS, BLOCK_N, units, UNIT)
        if ZEROED:
            zero = zeros_of(zero_ptr, rows, group, inside, NUM_GROUPS, SCALE_ROWS, NUMBERS, BITS, ZERO_PLUS)
            sums -= (zero + 16.0) * tl.sum(x, 1)[None, :]
        elif NUMBERS == "words":
            sums -= 24.0 * tl.sum(x, 1)[None, :]
    else:
        tile = tl.reshape(numbers_of(stored, NUMBERS, BITS, BLOCK_N, BLOCK_K), [BLOCK_N, units, UNIT])
        if ZEROED:
            zero = zeros_of(zero_ptr, rows, group, inside, NUM_GROUPS, SCALE_ROWS, NUMBERS, BITS, ZERO_PLUS)
            tile = _less(tile, zero[:, :, None], NUMBERS, BITS)
        elif NUMBERS == "words":
            tile = _less(tile, 1 << (BITS - 1), NUMBERS, BITS)
        sums = tl.sum(tile * x[None, :, :], 2)
    if SCALED:
        sums *= scales_of(scale_ptr, rows, group, inside, NUM_GROUPS, SCALE_ROWS, NUMBERS)
    return sums


@triton.jit
def _spread(values, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, UNIT: tl.constexpr):
    """Returns a value of each unit [BLOCK_N, BLOCK_K / UNIT] for each column, or values that broadcast."""
    if UNIT == 1 or UNIT == BLOCK_K:
        return values
    else:  # noqa: RET505 - only one branch is compiled
        wide = tl.broadcast_to(values[:, :, None], [BLOCK_N, BLOCK_K // UNIT, UNIT])
        return tl.reshape(wide, [BLOCK_N, BLOCK_K])


@triton.jit
def finished(
    acc, rows, row_scale_ptr, bias_ptr, n, ROW_SCALED: tl.constexpr, DIVIDES: tl.constexpr, BIASED: tl.constexpr
):
    """Returns sums [rows, columns] with what belongs to whole rows."""
    inside = rows < n
    if ROW_SCALED:
        scale = tl.load(row_scale_ptr + rows, mask=inside, other=1.0)
        acc = acc / scale[:, None] if DIVIDES else acc * scale[:, None]
    if BIASED:
        acc += tl.load(bias_ptr + rows, mask=inside, other=0.0).to(tl.float32)[:, None]
    return acc
