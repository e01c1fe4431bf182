"""The limits of grammars: of their compilation, their memory and the masks of tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """Limits. Fuel, items and states are the grammar library's units."""

    max_cached: int = 256  # compiled grammars
    max_cached_bytes: int = 128 << 20  # of compiled grammars, as measured or as an upper bound
    max_cached_seconds: float = 3600.0  # since the last use
    max_live_bytes: int = 1 << 30  # of the matchers of all running requests
    max_grown_bytes: int = 16 << 20  # cached grammars that may have grown more are dropped
    max_remembered: int = 4096  # verdicts of trials, kept without their grammars
    max_compile_cpu_seconds: float = 0.3  # of a trial; the compilation after it takes as long
    max_compile_seconds: float = 10.0  # of a trial on a busy machine
    max_compile_bytes: int = 12 << 20  # of a compiled grammar
    max_compile_peak_bytes: int = 64 << 20  # of address space that a trial adds
    max_lexer_fuel: int = 1_000_000  # of a compilation; about 50 k a millisecond
    max_grammar_size: int = 200_000  # symbols
    max_mask_cpu_seconds: float = 0.02  # of one token; see CpuAllowance
    max_step_fuel: int = 100_000  # of one token's mask; about 14 k a millisecond
    max_row_items: int = 20_000  # parses of one token
    max_step_items: int = 50_000  # of one token's mask; about 20 k a millisecond
    # For grammars written by a client, whose items may cost 30 ns for each other item of their row.
    max_written_row_items: int = 1000
    max_written_step_items: int = 5000
    max_lexer_states: int = 20_000  # 1 to 5 kB each
    max_plain_lexer_states: int = 100_000  # never reached: a plain constraint's text bounds them
