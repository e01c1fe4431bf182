"""Patterns of modules: those that trainers write are taken, and those that would hold the engine up are not."""

from __future__ import annotations

import re
import time

import pytest

from baton.worker.adapters.module_patterns import problem_of

MODULE = "base_model.model.model.layers.101.block_sparse_moe.experts.127.down_proj"


@pytest.mark.parametrize(
    "pattern",
    [
        "q_proj",
        "model.layers.0.self_attn.q_proj",
        r"^model\.decoder\.layers\.0\.encoder_attn\.k_proj",
        r".*\.layers\.(0|1|2)\.self_attn\.(q|k|v)_proj",
        r"layers\.\d+\.mlp\.experts\.\d+\.(gate|up)_proj",
        r"layers\.[0-9]{1,2}\.mlp(\.shared)?\.\w+",
        r"a\*b\+c\{",
        ".*.*.*.*!",
        r"\w+\w+\w+\w+!",
    ],
)
def test_usual_patterns_are_taken_and_fast(pattern: str) -> None:
    assert problem_of(pattern) == ""
    began = time.perf_counter()
    re.match(rf"(.*\.)?({pattern})$", MODULE)
    assert time.perf_counter() - began < 2.0


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        (r"(\w+\.?)+!", "repeats a group"),
        ("(a|a)*b", "repeats a group"),
        (r"(.*){9}x", "repeats a group"),
        (".*.*.*.*.*!", "has 5 repetitions"),
        (r"\\*a*a*a*a*", "has 5 repetitions"),
        ("q" * 257, "has 257 characters"),
        ("(", "is no regular expression"),
    ],
)
def test_patterns_that_may_take_hours_are_refused(pattern: str, problem: str) -> None:
    assert problem in problem_of(pattern)
