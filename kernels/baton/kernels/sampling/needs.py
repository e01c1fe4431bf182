"""The remaining work of each special row of a step, one word per row.

A kernel reads only this word to decide whether it must process a row.
"""

from __future__ import annotations

import triton.language as tl

NEEDS_CHOICE = tl.constexpr(1)  # of the best part
NEEDS_ARGMAX = tl.constexpr(2)
NEEDS_FILTERS = tl.constexpr(4)  # a search for the lowest logit that passes the filters
NEEDS_DRAW = tl.constexpr(8)  # over the whole vocabulary, without a search
NEEDS_RESTRICTION = tl.constexpr(16)  # to the tokens of its bitmap
NEEDS_SAMPLE = tl.constexpr(32)  # cuts from a sample of the row
NEEDS_ROW = tl.constexpr(64)  # a search of the whole row: its cuts were wrong
NEEDS_TRIAL = tl.constexpr(128)  # a draw from tokens above the lower cut, which may make the search unnecessary
NEEDS_LATE_DRAW = tl.constexpr(256)  # over the whole vocabulary, after a search
