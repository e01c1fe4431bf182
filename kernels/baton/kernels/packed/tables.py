"""Looks numbers of 4 bits up in the tables of bitsandbytes, by permuting bytes of registers."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import triton
import triton.language as tl

_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_SIZES = (0.0, 0.0625 / 12, 8 / 12, 1.0, 4 / 12, 6 / 12, 2 / 12, 3 / 12)
_FP4 = (*_SIZES, *(-size for size in _SIZES))


def lookup_code(table: Sequence[float]) -> str:
    """Returns PTX that turns a word of 8 numbers into eight words, each of which is a float of 32 bits.

    A permutation takes the last 3 bits of 4 numbers to choose 4 of 8 bytes. Each byte of floats is looked up in both
    halves of the table, of which the fourth bits choose one: in their permutation, 12 repeats the sign of byte 4, which
    is set, and 0 takes byte 0, which is 0.
    """
    floats = struct.pack(f"<{len(table)}f", *table)
    lines = [
        "and.b32 codes, $8, 0x77777777;",
        "shr.b32 fourth, $8, 1;",
        "and.b32 fourth, fourth, 0x44444444;",
        "lop3.b32 fourth, $8, 0x88888888, fourth, 0xEA;",
    ]
    for first in (0, 4):
        lines += ["prmt.b32 mask, 0, 0x80, fourth;"]
        for byte in range(4):
            words = [f"0x{value:08x}" for value in struct.unpack("<4I", floats[byte::4])]
            lines += [
                f"mov.b32 low, {words[0]};",
                f"prmt.b32 low, low, {words[1]}, codes;",
                f"mov.b32 high, {words[2]};",
                f"prmt.b32 high, high, {words[3]}, codes;",
                f"lop3.b32 byte{byte}, mask, high, low, 0xCA;",
            ]
        for pair, chosen in ((0, "0x5140"), (2, "0x7362")):
            lines += [
                f"prmt.b32 low, byte0, byte1, {chosen};",
                f"prmt.b32 high, byte2, byte3, {chosen};",
                f"prmt.b32 ${first + pair}, low, high, 0x5410;",
                f"prmt.b32 ${first + pair + 1}, low, high, 0x7632;",
            ]
        if first == 0:
            lines += ["shr.b32 codes, codes, 16;", "shr.b32 fourth, fourth, 16;"]
    names = "codes, fourth, mask, low, high, byte0, byte1, byte2, byte3"
    return "{\n.reg .b32 " + names + ";\n" + "\n".join(lines) + "\n}"


_PERMUTES: tl.constexpr = tl.constexpr(not triton.knobs.runtime.interpret)  # the interpreter runs no PTX
_NF4_TABLE: tl.constexpr = tl.constexpr(_NF4)
_FP4_TABLE: tl.constexpr = tl.constexpr(_FP4)
_NF4_CODE: tl.constexpr = tl.constexpr(lookup_code(_NF4))
_FP4_CODE: tl.constexpr = tl.constexpr(lookup_code(_FP4))


@triton.jit
def looked_up(words, NUMBERS: tl.constexpr):
    """Returns the 8 numbers of each word [.., 2, 2, 2] fp32."""
    if _PERMUTES:
        numbers = _permuted(words, NUMBERS)
    else:
        parts = tl.join(words, words >> 16)
        parts = tl.join(parts, parts >> 8)
        numbers = _chosen(tl.join(parts, parts >> 4) & 15, NUMBERS)
    return numbers


@triton.jit
def _permuted(words, NUMBERS: tl.constexpr):
    code: tl.constexpr = _NF4_CODE if NUMBERS == "nf4" else _FP4_CODE
    n0, n1, n2, n3, n4, n5, n6, n7 = tl.inline_asm_elementwise(
        code,
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r",
        [words],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )
    even = tl.join(tl.join(n0, n4), tl.join(n2, n6))
    odd = tl.join(tl.join(n1, n5), tl.join(n3, n7))
    return tl.join(even, odd).to(tl.float32, bitcast=True)


@triton.jit
def _chosen(codes, NUMBERS: tl.constexpr):
    table: tl.constexpr = _NF4_TABLE if NUMBERS == "nf4" else _FP4_TABLE
    numbers = tl.zeros(codes.shape, tl.float32)
    for code in tl.static_range(16):
        numbers = tl.where(codes == code, table[code], numbers)
    return numbers
