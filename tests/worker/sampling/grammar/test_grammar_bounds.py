"""No constraint costs more than its bound, in CPU, in memory that stays, and in each token's mask."""

from __future__ import annotations

import gc
import os
import random
import time
from collections.abc import Iterator

import numpy as np
import psutil
import pytest
from support.processes.cpu_seconds import cheapest
from support.sampling.constraint_search import random_constraint
from support.sampling.grammar_rig import SAMPLE_MODEL, choices, json_schema, make_request, regex

from baton.rpc.errors import InvalidRequest, NoCapacity
from baton.worker.core import Constraint, ConstraintForm, ModelSpec
from baton.worker.sampling.grammar.compilation.cache import Compiler
from baton.worker.sampling.grammar.compilation.cost import estimated_bytes, is_plain
from baton.worker.sampling.grammar.compilation.refusals import obvious_problem
from baton.worker.sampling.grammar.grammars import Grammars
from baton.worker.sampling.grammar.matching.match import GrammarMatch
from baton.worker.sampling.grammar.process_memory import allocated_bytes
from baton.worker.sampling.grammar.vocabulary import load_vocabulary

MODEL = ModelSpec(bytes(16), 4096, 512, (2,))
NUM_SEEDS = int(os.environ.get("CONSTRAINT_SEEDS", "30"))
MAX_REFUSED_SECONDS = 0.5
MAX_ACCEPTED_SECONDS = 1.0
MAX_KEPT_BYTES = 20 << 20
TEXT = {"type": "string"}


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    made = Grammars(lambda: SAMPLE_MODEL, MODEL, 1)
    for constraint in (regex("warm"), json_schema({"type": "object"})):
        settle(made, made.open(make_request(constraint=constraint), "me"))
    yield made
    made.close()


def settle(grammars: Grammars, match: GrammarMatch) -> GrammarMatch:
    until = time.monotonic() + 60
    while not match.ready:
        assert time.monotonic() < until
        grammars.settle(0.05)
    return match


def cpu_seconds(grammars: Grammars) -> float:
    """Of this process, the trial process and all that it forked and reaped."""
    process = grammars._trials._process
    assert process is not None
    times = psutil.Process(process.pid).cpu_times()
    return time.process_time() + sum((times.user, times.system, times.children_user, times.children_system))


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, 10))
def test_any_constraint_is_compiled_or_refused_within_its_bounds(grammars: Grammars, first: int) -> None:
    for seed in range(first, first + 10):
        constraint = random_constraint(seed)
        gc.collect()
        memory, cpu = allocated_bytes(), cpu_seconds(grammars)
        match = settle(grammars, grammars.open(make_request(constraint=constraint), "me"))
        spent = cpu_seconds(grammars) - cpu
        shown = f"seed {seed}: {constraint.form.value} {constraint.text[:300]!r}: {spent:.3f} s, {match.error}"
        assert match.error is None or isinstance(match.error, InvalidRequest | NoCapacity), shown
        refused = match.error is not None
        grammars.end(match)
        assert spent <= (MAX_REFUSED_SECONDS if refused else MAX_ACCEPTED_SECONDS), shown
        del match
        gc.collect()
        kept = allocated_bytes() - memory
        assert kept <= (1 << 20 if refused else MAX_KEPT_BYTES), f"{shown}; {kept / 1e6:.1f} MB"


def test_counts_of_any_length_are_added_up_without_their_digits() -> None:
    problem = obvious_problem(regex("a" + "{99999999999999999999}" * 400))
    assert problem is not None
    assert "1,000,000,000,000 times" in problem
    assert obvious_problem(json_schema({"pattern": "a" + "{0,99999999999999999999}" * 400})) is not None


@pytest.mark.parametrize("pattern", [r"\x{65039}", r"\u{65039}+", r"\p{Greek}{9}", "\\x{" * 60_000])
def test_the_code_of_a_character_is_no_count(pattern: str) -> None:
    assert obvious_problem(regex(pattern)) is None


def fields(count: int, sub: object) -> dict[str, object]:
    return {"type": "object", "properties": {f"key{index}": sub for index in range(count)}}


PLAIN = {
    "object": Constraint(ConstraintForm.JSON_OBJECT),
    "anything": json_schema({}),
    "small": json_schema(fields(5, TEXT)),
    "wide": json_schema(fields(90, {"type": "integer"})),
    "nested": json_schema(fields(10, fields(10, TEXT))),
    "lengths": json_schema(fields(4, {"type": "string", "minLength": 100, "maxLength": 1000})),
    "one length": json_schema({"type": "string", "maxLength": 4000}),
    "formats": json_schema(fields(10, {"type": "string", "format": "date-time"})),
    "bounds": json_schema({"type": "array", "items": {"type": "integer", "minimum": 7, "maximum": 10**15}}),
    "enum": json_schema({"type": "array", "items": {"enum": [f"value {index * 7919}" for index in range(400)]}}),
    "a long value": json_schema({"const": "ab " * 500}),
    "a tree": json_schema({**fields(3, TEXT), "properties": {"next": {"$ref": "#"}, "v": TEXT}}),
    "choices": choices(*(f"choice {index * 7919}" for index in range(256))),
    "long choices": choices(*(f"{index}" + "abc" * 20 for index in range(250))),
}  # fmt: skip


@pytest.mark.parametrize("constraint", PLAIN.values(), ids=PLAIN)
def test_the_memory_of_a_plain_constraint_is_within_the_estimate(constraint: Constraint) -> None:
    """However many tokens its matchers take: they share one automaton."""
    vocabulary = load_vocabulary(SAMPLE_MODEL, MODEL)
    assert is_plain(constraint)
    compiler = Compiler(vocabulary)
    before, began = allocated_bytes(), time.process_time()
    compiler.matcher(constraint)
    spent = time.process_time() - began
    assert spent < 0.1 or cheapest(lambda: Compiler(vocabulary).matcher(constraint), 0.1) < 0.1
    rng = random.Random(1)
    for _ in range(3):
        walk(compiler, constraint, rng)
    gc.collect()
    assert allocated_bytes() - before <= compiler.num_bytes == estimated_bytes(constraint)


def walk(compiler: Compiler, constraint: Constraint, rng: random.Random, num_tokens: int = 400) -> list[float]:
    """Takes random tokens; returns the CPU seconds of each step."""
    matcher = compiler.matcher(constraint)
    ends = set(compiler.vocabulary.eos_token_ids)
    steps = []
    for _ in range(num_tokens):
        words = np.empty(compiler.vocabulary.num_words, np.int32)
        began = time.thread_time()
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        steps.append(time.thread_time() - began)
        if matcher.is_stopped():
            break
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
        began = time.thread_time()
        taken = matcher.consume_token(rng.choice([token for token in allowed if token not in ends] or allowed))
        steps[-1] += time.thread_time() - began
        if not taken:
            break
    return steps


def test_grammars_that_grew_during_steps_are_not_cached(grammars: Grammars) -> None:
    """An automaton of 20,000 states, 100 MB, in one answer."""
    constraint = regex("([a-z]*[aeiou][a-z]{40}){10}")
    gc.collect()
    before = allocated_bytes()
    rng = random.Random(1)
    match = settle(grammars, grammars.open(make_request(constraint=constraint), "me"))
    assert match.error is None
    while match.error is None and not match.ended:
        allowed = np.flatnonzero(np.unpackbits(match.mask.view(np.uint8), bitorder="little")).tolist()
        grammars.advance(match, rng.choice(allowed))
        settle(grammars, match)
    assert match.error is None or isinstance(match.error, InvalidRequest)
    grammars.end(match)
    del match
    gc.collect()
    assert allocated_bytes() - before < MAX_KEPT_BYTES


def test_the_search_makes_many_kinds() -> None:
    made = [random_constraint(seed) for seed in range(60)]
    assert {constraint.form for constraint in made} >= {ConstraintForm.REGEX, ConstraintForm.GRAMMAR}
    assert len(set(made)) > 50
    assert 3 < sum(map(is_plain, made)) < 40
