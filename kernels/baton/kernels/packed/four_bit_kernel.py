"""The kernel of products of one token with weights of 4 bits, on the matrix unit of Ampere and later.

The eight columns of the matrix unit's right operand are parts of the token: of one vector, or of the vectors of a
token's choices. A warp holds virtual rows of the weight, each of which is a row within one part, and needs that part's
column of the product alone. Lanes side by side hold the parts of one row, whose columns alternate in pieces of 128, so
that a warp reads 512 bytes of a row at once. Numbers are unpacked in the order in which the left operand lies in
registers, and the token lies in shared memory in the same order.
"""
# ruff: noqa: RUF005 - kernels cannot unpack tuples

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from baton.kernels.hopper import load_elements


@gluon.jit
def _four_pairs(words, scale, FLOATS: gl.constexpr):
    """Returns the numbers n and n + 4 of each word as bfloat16 in both halves of a word, for n = 0, 1, 2, 3.

    FLOATS: times the scales, which are in both halves, too; else plus 128.
    """
    if FLOATS:
        first = _times(((words << 12) & -0x7FFF8000) | ((words << 6) & 0x01C001C0), scale)
        second = _times(((words << 8) & -0x7FFF8000) | ((words << 2) & 0x01C001C0), scale)
        third = _times(((words << 4) & -0x7FFF8000) | ((words >> 2) & 0x01C001C0), scale)
        fourth = _times((words & -0x7FFF8000) | ((words >> 6) & 0x01C001C0), scale)
    else:
        first = _integers(words)
        second = _integers(words >> 4)
        third = _integers(words >> 8)
        fourth = _integers(words >> 12)
    return first, second, third, fourth


@gluon.jit
def _times(left, right):
    return gl.inline_asm_elementwise("mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [left, right], gl.int32, True, 1)


@gluon.jit
def _integers(words):
    """Returns 128 plus the last 4 bits of both halves of words, as two bfloat16 a word."""
    return gl.inline_asm_elementwise(
        "lop3.b32 $0, $1, $2, $3, 0xEA;", "=r,r,r,r", [words, 0x000F000F, 0x43004300], gl.int32, True, 1
    )


@gluon.jit
def _exponents(stored):
    """Returns scales, exponents of 2 plus 127, as bfloat16 in both halves of a word, times 2^62.

    The bits of e2m1 are those of a bfloat16 2^126 times smaller: sums are 2^64 times smaller than they should be.
    """
    return gl.minimum(stored.to(gl.int32) + 62, 254) * 0x00800080


@gluon.jit
def _load(at, place, offset, END: gl.constexpr, EVEN: gl.constexpr):
    """Returns what is `offset` behind, or 0 where its place in the row is none before END."""
    return gl.load(at + offset) if EVEN else gl.load(at + offset, mask=place + offset < END, other=0)


@gluon.jit
def _copy(to, at, place, offset, END: gl.constexpr, EVEN: gl.constexpr):
    """Starts to copy what is `offset` behind to shared memory."""
    if EVEN:
        load_elements(to, at + offset)
    else:
        load_elements(to, at + offset, mask=place + offset < END)


@gluon.jit
def _experts_of(virtual, part, ids_ptr, pair, EXPERTS: gl.constexpr, CHOICES: gl.constexpr, SPAN: gl.constexpr):
    """Returns the expert of each virtual row."""
    expert = gl.zeros_like(virtual).to(gl.int64)
    if EXPERTS:
        if CHOICES > 1:
            expert += gl.load(ids_ptr + pair * CHOICES + part // SPAN)
        else:
            expert += gl.load(ids_ptr + pair)
    return expert


@gluon.jit
def _with_factors(
    scales,
    zeros,
    scale_at,
    zero_at,
    group,
    step,
    SPAN: gl.constexpr,
    NUM_GROUPS: gl.constexpr,
    GROUP: gl.constexpr,
    FLOATS: gl.constexpr,
    ZEROED: gl.constexpr,
    EVEN: gl.constexpr,
):
    """Returns scales and zeros with those of one more step."""
    if FLOATS:
        scales = scales + (_load(scale_at, group, step * SPAN * 4, NUM_GROUPS, EVEN),)
    else:
        at = gl.minimum((group + step * SPAN * 128) // GROUP, NUM_GROUPS - 1)
        scales = scales + (gl.load(scale_at + at),)
        if ZEROED:
            zeros = zeros + (gl.load(zero_at + at),)
    return scales, zeros


@gluon.jit
def _launch_next():
    gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], gl.int32, False, 1)


@gluon.jit
def _wait_for_previous():
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], gl.int32, False, 1)


@gluon.jit
def four_bit_kernel(
    out_ptr,  # [num_pairs, n]
    x_ptr,  # [num_tokens, K]; with several CHOICES: [num_tokens, CHOICES, K]
    words_ptr,  # [num_experts, n, K / 8] int32; GATED: 2 n rows, gates first
    scale_ptr,  # [num_experts, n, NUM_GROUPS]; GATED: 2 n rows
    zero_ptr,  # [n / 8, NUM_GROUPS] int32; GATED: 2 n rows
    bias_ptr,  # [num_experts, n]; GATED: 2 n
    norm_ptr,  # [K]
    order_ptr,  # [K] int32
    residual_ptr,  # [num_pairs, n]
    ids_ptr,  # [num_tokens, TOP_K]
    share_ptr,  # [num_tokens, TOP_K] fp32
    n,
    eps,
    limit,
    alpha,
    K: gl.constexpr,
    FLOATS: gl.constexpr,  # e2m1 with a scale a group of 32, or integers
    NUM_GROUPS: gl.constexpr,
    GROUP: gl.constexpr,  # columns of a scale
    ZEROED: gl.constexpr,
    ZERO_PLUS: gl.constexpr,
    BIASED: gl.constexpr,
    NORM: gl.constexpr,
    ORDERED: gl.constexpr,  # columns are in another order than the token's
    GATED: gl.constexpr,
    CLAMPED: gl.constexpr,
    RESIDUAL: gl.constexpr,
    EXPERTS: gl.constexpr,
    TOP_K: gl.constexpr,
    CHOICES: gl.constexpr,  # experts whose products are added: 1, or TOP_K
    WORDS_STEP: gl.constexpr,
    SCALE_STEP: gl.constexpr,
    WARPS: gl.constexpr,
    TILES: gl.constexpr,
    DEPTH: gl.constexpr,
    OVERLAP: gl.constexpr,
    SHARED: gl.constexpr,  # words are loaded ahead to shared memory, not to registers
    AHEAD: gl.constexpr,  # steps that factors are loaded ahead
):
    """out_p = residual_p + sum_c share_c gated(bias_e + weight_e f(x_t)) for pair p of token t and its experts e

    weight_nk = (stored_nk - zero_ng) scale_ng for the group g of column k; f is RMSNorm with NORM. Without EXPERTS
    there is one weight. GATED has one of the CHOICES.
    """
    # grid: (n / ROWS, num_pairs); with several CHOICES: (n / ROWS, num_tokens)
    SPAN: gl.constexpr = 8 // CHOICES  # parts of a row
    STEPS: gl.constexpr = (K + SPAN * 128 - 1) // (SPAN * 128)
    EVEN: gl.constexpr = STEPS * SPAN * 128 == K
    TILE: gl.constexpr = 2 * WARPS  # rows
    ROWS: gl.constexpr = TILE if GATED else TILE * TILES
    HIGH: gl.constexpr = 8 * TILE * TILES  # virtual rows: tile, row, part
    ONCE: gl.constexpr = EXPERTS and CHOICES == 1  # this kernel reads ids that the previous one may write
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, 8])
    left: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=mma, k_width=8)
    right: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=mma, k_width=8)
    by_row: gl.constexpr = gl.SliceLayout(1, mma)
    # A virtual row of a step is four lanes of four words.
    in_words: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], [8, 0, 0]] + ([[16 * WARPS, 0, 0]] if TILES == 2 else []),
        lane_bases=[[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        warp_bases=[[16, 0, 0]]
        + ([[32, 0, 0]] if WARPS > 2 else [])
        + ([[64, 0, 0]] if WARPS > 4 else [])
        + ([[128, 0, 0]] if WARPS > 8 else []),
        block_bases=[],
        shape=[HIGH, 4, 4],
    )
    by_lane: gl.constexpr = gl.SliceLayout(2, in_words)
    in_x: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[1], [2], [4], [256], [512]],
        lane_bases=[[8], [16], [32], [64], [128]],
        warp_bases=[[0]] + ([[0]] if WARPS > 2 else []) + ([[0]] if WARPS > 4 else []) + ([[0]] if WARPS > 8 else []),
        block_bases=[],
        shape=[1024],
    )
    flat: gl.constexpr = gl.BlockedLayout([8], [32], [WARPS], [0])
    first = gl.program_id(0) * ROWS
    pair = gl.program_id(1)
    num_rows = 2 * n if GATED else n
    if OVERLAP:
        if ONCE:
            _wait_for_previous()
        _launch_next()

    # Where words and scales are.
    apart = n if GATED else TILE  # rows from one tile to the other
    virtual = gl.arange(0, HIGH, layout=gl.SliceLayout(1, by_lane))
    part = virtual % 8
    row = gl.minimum(first + virtual // 8 % TILE + virtual // (8 * TILE) * apart, num_rows - 1).to(gl.int64)
    expert = _experts_of(virtual, part, ids_ptr, pair, EXPERTS, CHOICES, SPAN)
    lane = gl.arange(0, 4, layout=gl.SliceLayout(0, by_lane))
    word = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, in_words)))
    lane_place = (part % SPAN * 4)[:, None] + lane[None, :]  # in 32 columns
    place = (lane_place * 4)[:, :, None] + word[None, None, :]
    words_at = words_ptr + (expert * WORDS_STEP + row * (K // 8))[:, None, None] + place
    out_virtual = gl.arange(0, HIGH, layout=by_row)
    out_part = out_virtual % 8
    out_row = gl.minimum(first + out_virtual // 8 % TILE + out_virtual // (8 * TILE) * apart, num_rows - 1)
    out_expert = _experts_of(out_virtual, out_part, ids_ptr, pair, EXPERTS, CHOICES, SPAN)
    if FLOATS:
        group = lane_place
        scale_at = scale_ptr + (expert * SCALE_STEP + row * NUM_GROUPS)[:, None] + group
        zero_at = group
    else:
        group = out_part * 128
        scale_at = scale_ptr + out_row * NUM_GROUPS
        zero_at = zero_ptr + out_row // 8 * NUM_GROUPS

    # The first steps, while the previous kernel still runs.
    words = ()
    scales = ()
    zeros = ()
    if SHARED:
        rows_of_words: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
        buffer = gl.allocate_shared_memory(gl.int32, [DEPTH, HIGH, 4, 4], rows_of_words)
    for step in gl.static_range(DEPTH):
        if step < STEPS:
            if SHARED:
                _copy(buffer.index(step), words_at, place, step * SPAN * 16, K // 8, EVEN)
            else:
                words = words + (_load(words_at, place, step * SPAN * 16, K // 8, EVEN),)  # type: ignore[assignment]
        if SHARED:
            async_copy.commit_group()
    for step in gl.static_range(AHEAD):
        if step < STEPS:
            scales, zeros = _with_factors(
                scales, zeros, scale_at, zero_at, group, step, SPAN, NUM_GROUPS, GROUP, FLOATS, ZEROED, EVEN
            )
    if OVERLAP and not ONCE:
        _wait_for_previous()

    # The token.
    held: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    memory = gl.allocate_shared_memory(gl.bfloat16, [STEPS, 1024], held)
    places = gl.arange(0, 1024, layout=flat)
    ks = places % (SPAN * 128)
    x_ptr += pair // (TOP_K if CHOICES == 1 else 1) * (CHOICES * K)
    x_at = x_ptr + places // 128 // SPAN * K + ks
    squares = gl.zeros([1024], gl.float32, layout=flat)
    for step in gl.static_range(STEPS):
        if ORDERED:  # of one weight
            place_in_x = _load(order_ptr + ks, ks, step * SPAN * 128, K, EVEN)
            x = _load(x_ptr + place_in_x, ks + step * SPAN * 128, 0, K, EVEN)
        else:
            x = _load(x_at, ks, step * SPAN * 128, K, EVEN)
        if NORM:
            wide = x.to(gl.float32)
            squares += wide * wide
            if ORDERED:
                factor = _load(norm_ptr + place_in_x, ks + step * SPAN * 128, 0, K, EVEN)
            else:
                factor = _load(norm_ptr + ks, ks, step * SPAN * 128, K, EVEN)
            x = (wide * factor.to(gl.float32)).to(gl.bfloat16)
        # [part, lane, word, half, pair] -> [word, part, lane, pair, half]
        x = gl.permute(gl.reshape(x, [8, 4, 4, 2, 4]), [2, 0, 1, 4, 3])
        memory.index(step).store(gl.reshape(x, [1024]))
    shrink = 1.0
    if NORM:
        shrink = gl.rsqrt(gl.sum(squares, 0) / K + eps)

    ones = gl.full([8 * TILE, 128], -1.0, gl.bfloat16, layout=left)
    acc = gl.zeros([HIGH, 8], gl.float32, layout=mma)
    for step in gl.static_range(STEPS):
        if SHARED:
            async_copy.wait_group(DEPTH - 1)
            own = buffer.index(step % DEPTH).load(in_words)
            if step + DEPTH < STEPS:
                _copy(buffer.index(step % DEPTH), words_at, place, (step + DEPTH) * SPAN * 16, K // 8, EVEN)
            async_copy.commit_group()
        else:
            own = words[0]  # type: ignore[misc]
            words = words[1:]
            if step + DEPTH < STEPS:
                words = words + (_load(words_at, place, (step + DEPTH) * SPAN * 16, K // 8, EVEN),)  # type: ignore[assignment]
        scale = scales[0]  # type: ignore[misc]
        zero = zeros[0] if ZEROED else scale  # type: ignore[misc]
        scales = scales[1:]
        zeros = zeros[1:] if ZEROED else zeros
        if step + AHEAD < STEPS:
            scales, zeros = _with_factors(
                scales, zeros, scale_at, zero_at, group, step + AHEAD, SPAN, NUM_GROUPS, GROUP, FLOATS, ZEROED, EVEN
            )
        b = gl.reshape(memory.index(step).load(in_x), [4, 8, 4, 8])  # word, part, lane, number
        b = gl.convert_layout(gl.reshape(gl.permute(b, [0, 2, 3, 1]), [128, 8]), right, assert_trivial=True)
        factor = own
        if FLOATS:
            factor, own = gl.broadcast(_exponents(scale)[:, :, None], own)
        p0, p1, p2, p3 = _four_pairs(own, factor, FLOATS)
        pairs = gl.join(gl.join(p0, p2), gl.join(p1, p3))
        low = pairs.to(gl.int16).to(gl.bfloat16, bitcast=True)
        high = (pairs >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True)
        a = gl.reshape(gl.permute(gl.join(low, high), [0, 2, 1, 3, 4, 5]), [HIGH, 128])
        a = gl.convert_layout(a, left, assert_trivial=True)
        if FLOATS:
            acc = mma_v2(a, b, acc)
        else:
            less = mma_v2(ones, b, gl.zeros([8 * TILE, 8], gl.float32, layout=mma))
            if TILES == 2:
                less = gl.reshape(gl.permute(gl.join(less, less), [2, 0, 1]), [HIGH, 8])
            less = gl.convert_layout(less, mma, assert_trivial=True)
            if ZEROED:
                offset = (((zero >> (out_row % 8 * 4)) + ZERO_PLUS) & 15).to(gl.float32) + 128.0
                less = less * offset[:, None]
            else:
                less = less * 136.0
            acc += mma_v2(a, b, less) * scale.to(gl.float32)[:, None]

    columns = gl.arange(0, 8, layout=gl.SliceLayout(0, mma))
    sums = gl.sum(gl.where(columns[None, :] == out_part[:, None], acc, 0.0), 1) * shrink
    if FLOATS:
        sums *= 18446744073709551616.0  # 2^64
    if BIASED:
        bias = gl.load(bias_ptr + out_expert * num_rows + out_row).to(gl.float32)
        sums += gl.where(out_part % SPAN == 0, bias, 0.0)
    if CHOICES > 1:
        sums *= gl.load(share_ptr + pair * CHOICES + out_part // SPAN)
    sums = gl.sum(gl.reshape(sums, [TILES, TILE, 8]), 2)
    last: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    rows = first + gl.arange(0, ROWS, layout=last)
    if GATED:
        gate, up = gl.split(gl.permute(sums, [1, 0]))
        gate = gl.convert_layout(gate, last)
        up = gl.convert_layout(up, last)
        if CLAMPED:
            gate = gl.minimum(gate, limit)
            up = gl.minimum(gl.maximum(up, -limit), limit)
            out = gate / (1.0 + gl.exp(-alpha * gate)) * (up + 1.0)
        else:
            out = gate / (1.0 + gl.exp(-gate)) * up
    else:
        out = gl.convert_layout(gl.reshape(sums, [ROWS]), last)
    if RESIDUAL:
        out += gl.load(residual_ptr + pair * n + rows, mask=rows < n, other=0.0).to(gl.float32)
    gl.store(out_ptr + pair * n + rows, out.to(gl.bfloat16), mask=rows < n)
