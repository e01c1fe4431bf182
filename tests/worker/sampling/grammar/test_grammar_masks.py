"""What one token's mask may cost in CPU time, and which constraints stay within that."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import numpy as np
import pytest
from support.sampling.grammar_rig import SAMPLE_MODEL, json_schema, make_request, regex

from baton.rpc.errors import InvalidRequest
from baton.worker.core import Constraint, ConstraintForm, ModelSpec
from baton.worker.sampling.grammar.grammars import Grammars
from baton.worker.sampling.grammar.limits import GrammarLimits
from baton.worker.sampling.grammar.matching.cpu_allowance import CpuAllowance
from baton.worker.sampling.grammar.matching.match import GrammarMatch

MODEL = ModelSpec(bytes(16), 4096, 512, (2,))
MOST = GrammarLimits().max_mask_cpu_seconds
TEXT = {"type": "string"}


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    made = Grammars(lambda: SAMPLE_MODEL, MODEL, 1)
    yield made
    made.close()


def wait_for(grammars: Grammars, match: GrammarMatch) -> GrammarMatch:
    until = time.monotonic() + 120
    while not match.ready:
        assert time.monotonic() < until
        grammars.settle(0.05)
    return match


def steps(grammars: Grammars, constraint: Constraint, num_tokens: int) -> tuple[GrammarMatch, list[float]]:
    """Takes random tokens. Returns the match, and the process's CPU seconds of each step."""
    rng = random.Random(1)
    match = wait_for(grammars, grammars.open(make_request(constraint=constraint), None))
    seconds = []
    while match.error is None and not match.ended and len(seconds) < num_tokens:
        allowed = np.flatnonzero(np.unpackbits(match.mask.view(np.uint8), bitorder="little")).tolist()
        began = time.process_time()
        grammars.advance(match, rng.choice([token for token in allowed if token != 2] or allowed))
        wait_for(grammars, match)
        seconds.append(time.process_time() - began)
    return match, seconds


def grammar(text: str) -> Constraint:
    return Constraint(ConstraintForm.GRAMMAR, text)


def fields(count: int, sub: object = TEXT) -> dict[str, object]:
    return {"type": "object", "properties": {f"key{index}": sub for index in range(count)}}


HOSTILE = {
    "two halves": grammar('start: start start | "a"'),
    "three thirds": grammar('start: x\nx: x x x | x x | "a" | "b"'),
    "nullable": grammar('start: x\nx: x x | y\ny: "a"? z\nz: "a"? x?'),
    "palindromes": grammar('start: p+\np: "a" p "a" | "b" p "b" | "a"* | p p'),
}


@pytest.mark.parametrize("constraint", HOSTILE.values(), ids=HOSTILE)
def test_an_ambiguous_grammar_ends_before_its_masks_are_costly(grammars: Grammars, constraint: Constraint) -> None:
    match, seconds = steps(grammars, constraint, 4000)
    assert isinstance(match.error, InvalidRequest), len(seconds)
    assert match.error.field == "constraint.grammar"
    assert "ambiguous" in match.error.message
    assert sum(max(0.0, one - 2 * MOST) for one in seconds) < 0.1, sorted(seconds)[-9:]


ORDINARY = {
    "1000 properties": json_schema(fields(1000)),
    "2000 required": json_schema({**fields(2000), "required": [f"key{index}" for index in range(2000)]}),
    "nested": json_schema(fields(40, fields(40))),
    "alternatives": json_schema({"type": "array", "items": {"anyOf": [fields(4, {"const": i}) for i in range(200)]}}),
    "values": json_schema({"type": "array", "items": {"enum": [f"value {index * 7919}" for index in range(4000)]}}),
    "patterns": json_schema(fields(30, {"type": "string", "pattern": "^[A-Z]{2,8}-[0-9]{1,12}$"})),
    "words": regex(r"(\w+[ ,.!?]){1,200}"),
    "rules": grammar(
        "start: line+\nline: name \"(\" (arg (\", \" arg)*)? \")\\n\"\n"
        + "arg: name | NUMBER | list\nlist: \"[\" (arg (\", \" arg)*)? \"]\"\nNUMBER: /[0-9]+/\n"
        + "name: " + " | ".join(f'"name{index}"' for index in range(300))
    ),
}  # fmt: skip


@pytest.mark.parametrize("constraint", ORDINARY.values(), ids=ORDINARY)
def test_a_large_ordinary_constraint_is_served(grammars: Grammars, constraint: Constraint) -> None:
    match, _ = steps(grammars, constraint, 300)
    assert match.error is None


def test_an_output_that_the_request_came_with_costs_no_more(grammars: Grammars) -> None:
    first, _ = steps(grammars, HOSTILE["two halves"], 1)
    only = int(np.flatnonzero(np.unpackbits(first.mask.view(np.uint8), bitorder="little"))[-1])
    began = time.process_time()
    resumed = make_request(constraint=HOSTILE["two halves"], output=[only] * 3000)
    match = wait_for(grammars, grammars.open(resumed, None))
    assert isinstance(match.error, InvalidRequest)
    assert match.error.field == "constraint.grammar"
    assert time.process_time() - began < 15


def test_an_allowance_is_for_each_token_and_once_more_in_sum() -> None:
    allowance = CpuAllowance(0.02)
    assert all(allowance.spend(0.02) for _ in range(1000))
    assert allowance.spend(0.03)
    assert allowance.spend(0.5, num_tokens=32)
    assert allowance.spend(0.03)
    assert not allowance.spend(0.021)
