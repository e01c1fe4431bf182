"""The masks behind guesses are those of the tokens once they are drawn, and a walk leaves the match where it was."""

from __future__ import annotations

import random

import numpy as np
import pytest
from support.engine.spec_runs import CONSTRAINTS, MODEL

from baton.worker.core import Constraint, ConstraintForm, Int32, ModelSpec, Request, SamplingParams, StopConditions
from baton.worker.sampling.grammar.grammars import Grammars
from baton.worker.sampling.grammar.matching.match import GrammarMatch, Lane

VOCAB_SIZE = 4096
OBJECT = Constraint(
    ConstraintForm.JSON_SCHEMA,
    '{"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "number"}}, "required": ["a", "b"]}',
)


@pytest.fixture
def grammars():
    made = Grammars(lambda: MODEL, ModelSpec(bytes(16), VOCAB_SIZE, 2048, (2,)), 1)
    yield made
    made.close()


def opened(grammars: Grammars, constraint: Constraint, min_tokens: int = 0) -> GrammarMatch:
    sampling = SamplingParams(min_tokens=min_tokens, suppressed_token_ids=(2,))
    request = Request("r", [1, 5], 2, sampling, StopConditions(90), bytes(16), constraint=constraint)
    match = grammars.open(request, None)
    return settled(grammars, match)


def settled(grammars: Grammars, match: GrammarMatch) -> GrammarMatch:
    assert grammars.settle(30.0) == [match]
    assert match.error is None
    return match


def allowed(mask: Int32) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


@pytest.mark.parametrize("min_tokens", [0, 12])
@pytest.mark.parametrize("constraint", [*CONSTRAINTS, OBJECT], ids=lambda one: one.form.value)
def test_walked_masks_are_those_of_drawn_tokens(grammars: Grammars, constraint: Constraint, min_tokens: int) -> None:
    rng, compared = random.Random(3), 0
    stepped, joined = (opened(grammars, constraint, min_tokens) for _ in range(2))
    while not stepped.ended and compared < 60:
        before = stepped.mask.copy()
        walk, drawn, mask = joined.walk(), list[int](), stepped.mask
        for _ in range(rng.randint(1, 5)):
            token_id = rng.choice(allowed(mask))
            walked = walk.follow(token_id)
            grammars.advance(stepped, token_id)
            settled(grammars, stepped)
            drawn.append(token_id)
            if stepped.ended:
                assert walked is None
                break
            if walked is None:
                break
            assert (walked == stepped.mask).all()
            mask, compared = walked, compared + 1
        assert (joined.mask == before).all()
        assert joined.ready
        for token_id in drawn:
            grammars.advance(joined, token_id)
        assert grammars.num_advancing == 1
        settled(grammars, joined)
        assert joined.ended is stepped.ended
        assert joined.ended or (joined.mask == stepped.mask).all()
    assert compared > 3


def test_a_walk_ends_at_a_token_that_the_constraint_refuses_and_with_slow_masks(grammars: Grammars) -> None:
    match = opened(grammars, OBJECT)
    refused = next(token_id for token_id in range(5, VOCAB_SIZE) if token_id not in allowed(match.mask))
    walk = match.walk()
    assert walk.follow(refused) is None
    assert walk.follow(allowed(match.mask)[0]) is None
    match.lane = Lane.SLOW
    assert match.walk().follow(allowed(match.mask)[0]) is None
    grammars.advance(match, allowed(match.mask)[0])
    settled(grammars, match)
