"""The sampling parameters of each row of the persistent batch, as columns of 32-bit words on the device.

The word of column c for row r is words[c * stride + r], so one scatter writes the parameters of any rows. Lists
(biases, bitmaps, sequences) are in separate memory, whose address is in two columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ALIGNMENT = 64  # words, as for an allocation

# float32 bits
TEMPERATURE = tl.constexpr(0)
TOP_P = tl.constexpr(1)
MIN_P = tl.constexpr(2)
REPETITION = tl.constexpr(3)
FREQUENCY = tl.constexpr(4)
PRESENCE = tl.constexpr(5)
# int32
TOP_K = tl.constexpr(6)  # 0 is off
NUM_PROMPT = tl.constexpr(7)
SEED_LOW = tl.constexpr(8)
SEED_HIGH = tl.constexpr(9)
FLAGS = tl.constexpr(10)
MIN_TOKENS = tl.constexpr(11)
LISTS_LOW = tl.constexpr(12)  # the address of the row's lists
LISTS_HIGH = tl.constexpr(13)
NUM_BIASES = tl.constexpr(14)
NUM_SEQUENCES = tl.constexpr(15)
SEQUENCE_WIDTH = tl.constexpr(16)  # tokens of the longest sequence, without the last
REASONING_TOKENS = tl.constexpr(17)
REASONING_START = tl.constexpr(18)  # -1: the output begins with reasoning
NUM_REASONING_END = tl.constexpr(19)  # 0: no limit
NUM_LOGPROBS = tl.constexpr(20)  # -1: none
NUM_NAMED = tl.constexpr(21)  # number of tokens whose log-probabilities are requested by id
NUM_COLUMNS = 22

# Bits of FLAGS. Rows without SPECIAL are sampled from unedited logits, without filters.
SPECIAL = tl.constexpr(1)
BIASED = tl.constexpr(2)
PENALIZED = tl.constexpr(4)
ALLOWED = tl.constexpr(8)  # the lists have a bitmap of the allowed tokens
SUPPRESSED = tl.constexpr(16)  # ... and one of tokens that are forbidden before MIN_TOKENS
RULED = tl.constexpr(32)  # sequences or a reasoning limit
KEPT = tl.constexpr(64)  # the logits that it draws from are stored, so its filters' bound must be exact
RESTRICTED = tl.constexpr(8 | 16 | 32)  # some tokens are forbidden


@triton.jit
def load_number(row_ptr, stride, COLUMN: tl.constexpr):
    """Loads an int32 column of the row whose first word row_ptr points to."""
    return tl.load(row_ptr + COLUMN * stride)


@triton.jit
def load_fraction(row_ptr, stride, COLUMN: tl.constexpr):
    """Loads a float32 column."""
    return tl.load(row_ptr + COLUMN * stride).to(tl.float32, bitcast=True)


@triton.jit
def load_long(row_ptr, stride, LOW: tl.constexpr):
    """Loads 64 bits from a column and the next one."""
    low = tl.load(row_ptr + LOW * stride).to(tl.int64) & 0xFFFFFFFF
    return low | (tl.load(row_ptr + (LOW + 1) * stride).to(tl.int64) << 32)


@triton.jit
def load_lists(row_ptr, stride):
    """Returns the pointer to the row's lists."""
    return load_long(row_ptr, stride, LISTS_LOW).to(tl.pointer_type(tl.int32))


@triton.jit
def is_filtered(row_ptr, stride):
    """Returns whether top_k, top_p or min_p exclude tokens."""
    some = (load_number(row_ptr, stride, TOP_K) > 0) | (load_fraction(row_ptr, stride, TOP_P) < 1)
    return some | (load_fraction(row_ptr, stride, MIN_P) > 0)


class SamplingColumns:
    """The words, and views of columns for tests and benchmarks."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.num_rows = num_rows
        self.stride = triton.cdiv(num_rows, _ALIGNMENT) * _ALIGNMENT
        self.words = torch.zeros(NUM_COLUMNS * self.stride, dtype=torch.int32, device=device)
        # Rows that were never admitted allow all tokens.
        self.fractions(TOP_P).fill_(1.0)
        self.fractions(REPETITION).fill_(1.0)
        self.numbers(REASONING_START).fill_(-1)
        self.numbers(NUM_LOGPROBS).fill_(-1)

    def numbers(self, column: tl.constexpr) -> torch.Tensor:
        """Returns an int32 column, [num_rows]."""
        first = column.value * self.stride
        return self.words[first : first + self.num_rows]

    def fractions(self, column: tl.constexpr) -> torch.Tensor:
        """Returns a float32 column, [num_rows]."""
        return self.numbers(column).view(torch.float32)
