"""The memory of the matchers of running requests: estimated, measured, and bounded for all tenants together."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher
from support.sampling.grammar_rig import SAMPLE_MODEL, choices, json_schema, make_request, regex, wait_for

from baton.rpc.errors import InvalidRequest
from baton.worker.core import Constraint, ConstraintForm, ModelSpec
from baton.worker.sampling.grammar.compilation.cache import Compiler
from baton.worker.sampling.grammar.grammars import Grammars
from baton.worker.sampling.grammar.limits import GrammarLimits
from baton.worker.sampling.grammar.matching.cpu_allowance import CpuAllowance
from baton.worker.sampling.grammar.matching.live_matchers import LiveMatchers
from baton.worker.sampling.grammar.matching.match import GrammarMatch
from baton.worker.sampling.grammar.matching.memory_budget import Holding, to_end
from baton.worker.sampling.grammar.matching.memory_usage import grown_bytes, reported_work
from baton.worker.sampling.grammar.process_memory import allocated_bytes
from baton.worker.sampling.grammar.vocabulary import Vocabulary, load_vocabulary

MODEL = ModelSpec(bytes(16), 4096, 512, (2,))
MIB = 1 << 20
TEXT = {"type": "string"}
GROWS = regex("([a-z]*[aeiou][a-z]{40}){10}")  # to 100 MB within 300 tokens
SMALL = json_schema({"type": "object", "properties": {"name": TEXT}, "required": ["name"]})

HELD = st.lists(st.builds(Holding, st.sampled_from([b"a", b"b", b"c"]), st.integers(1, 1000)), min_size=1)


@given(HELD)
def test_the_largest_of_the_tenant_that_holds_most_ends(held: list[Holding]) -> None:
    ended = to_end(held)
    assert ended is not None
    sums = {one.tenant: sum(each.num_bytes for each in held if each.tenant == one.tenant) for one in held}
    assert sums[ended.tenant] == max(sums.values())
    assert sums[ended.tenant] * len(sums) >= sum(sums.values())
    assert ended.num_bytes == max(one.num_bytes for one in held if one.tenant == ended.tenant)


def test_without_holdings_no_request_ends() -> None:
    assert to_end([]) is None


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return load_vocabulary(SAMPLE_MODEL, MODEL)


def walk(vocabulary: Vocabulary, matcher: LLMatcher, num_tokens: int, seed: int = 1) -> None:
    rng = random.Random(seed)
    for _ in range(num_tokens):
        words = np.empty(vocabulary.num_words, np.int32)
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if matcher.is_stopped():
            break
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
        if not matcher.consume_token(rng.choice([token for token in allowed if token != 2] or allowed)):
            break


def fields(count: int, sub: object = TEXT) -> dict[str, object]:
    return {"type": "object", "properties": {f"key{index}": sub for index in range(count)}}


KINDS = {
    "grows": GROWS,
    "two of many": regex("(a|b)*a(a|b){40}"),
    "counted": regex(r"(([\p{L}\p{N}]|\s){0,40000})?"),
    "forced": regex("a*(bc){6000}"),
    "not a": regex("([^a]*a.{14}){6}"),
    "words": regex(r"(\w+ ){1,300}"),
    "lengths": json_schema(fields(4, {"type": "string", "minLength": 100, "maxLength": 1000})),
    "object": json_schema(fields(20)),
    "pattern": json_schema(fields(3, {"type": "string", "pattern": "^[a-z]*x[a-z]{30}$"})),
    "free": Constraint(ConstraintForm.JSON_OBJECT),
    "choices": choices(*(f"choice {index * 7919} " + "abc" * 9 for index in range(200))),
    "ambiguous": Constraint(ConstraintForm.GRAMMAR, 'start: start start | "a" | "b" | "ab"'),
}


@pytest.mark.parametrize("constraint", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("num_tokens", [20, 150])
def test_a_matcher_grows_by_no_more_than_is_estimated(
    vocabulary: Vocabulary, constraint: Constraint, num_tokens: int
) -> None:
    excess = [_grown_beyond_estimate(vocabulary, constraint, num_tokens) for _ in range(3)]
    assert min(excess) <= 0, excess  # other threads allocate too, but not each time


def _grown_beyond_estimate(vocabulary: Vocabulary, constraint: Constraint, num_tokens: int) -> int:
    """Returns by how many bytes the process grew more than is estimated for the matcher."""
    matcher = Compiler(vocabulary).matcher(constraint, num_bytes=0)
    began = reported_work(matcher)
    assert began is not None
    gc.collect()
    before = allocated_bytes()
    walk(vocabulary, matcher, num_tokens)
    gc.collect()
    now = reported_work(matcher)
    assert now is not None
    return allocated_bytes() - before - grown_bytes(began, now)


def test_an_ordinary_answers_memory_is_estimated_within_a_few_megabytes(vocabulary: Vocabulary) -> None:
    for constraint in (SMALL, KINDS["object"], KINDS["free"], KINDS["choices"]):
        matcher = Compiler(vocabulary).matcher(constraint, num_bytes=0)
        began = reported_work(matcher)
        walk(vocabulary, matcher, 500)
        now = reported_work(matcher)
        assert began is not None
        assert now is not None
        assert grown_bytes(began, now) <= 6 * MIB


def test_a_report_leaves_the_matcher_as_it_was(vocabulary: Vocabulary) -> None:
    matcher = Compiler(vocabulary).matcher(GROWS, num_bytes=0)
    walk(vocabulary, matcher, 20)
    first = reported_work(matcher)
    assert first == reported_work(matcher)
    assert not matcher.is_error()
    walk(vocabulary, matcher, 5)
    second = reported_work(matcher)
    assert first is not None
    assert second is not None
    assert (second.fuel, second.num_text_bytes) > (first.fuel, first.num_text_bytes)


class Live:
    """Matches of several tenants, the process's memory and a clock that tests set."""

    def __init__(self, vocabulary: Vocabulary, max_bytes: int) -> None:
        self.process_bytes = 1000 * MIB
        self.now = 0.0
        self.matchers = LiveMatchers(max_bytes, lambda: self.process_bytes, lambda: self.now)
        self._vocabulary = vocabulary
        self._compiler = Compiler(vocabulary)

    def add(self, tenant: str, num_bytes: int, seconds: float = 1.0) -> GrammarMatch:
        match = GrammarMatch(make_request(constraint=GROWS, tenant=tenant), None, CpuAllowance(1.0))
        matcher = self._compiler.matcher(GROWS, num_bytes=0)
        self.now += seconds
        self.matchers.add(match, matcher, num_bytes)
        match.open(self._vocabulary, matcher)
        return match


def test_no_request_ends_while_the_process_is_small(vocabulary: Vocabulary) -> None:
    live = Live(vocabulary, 10 * MIB)
    matches = [live.add("a", 30 * MIB) for _ in range(3)]
    live.process_bytes += 10 * MIB
    matches.append(live.add("b", 30 * MIB))
    assert [match.ending for match in matches] == [None] * 4
    assert live.matchers.num_bytes == 120 * MIB


def test_the_tenant_that_holds_most_loses_its_largest(vocabulary: Vocabulary) -> None:
    live = Live(vocabulary, 100 * MIB)
    good = [live.add("good", 30 * MIB), live.add("good", 20 * MIB)]
    bad = [live.add("bad", 25 * MIB), live.add("bad", 28 * MIB)]
    live.process_bytes += 101 * MIB
    late = live.add("good", 1 * MIB)
    assert [match.ending is not None for match in (*good, *bad, late)] == [False, False, False, True, False]
    assert isinstance(bad[1].ending, InvalidRequest)
    assert bad[1].ending.field == "constraint.regex"
    assert "100 MiB" in bad[1].ending.message
    assert live.matchers.num_bytes == 76 * MIB
    later = live.add("good", 30 * MIB)  # what bad[1] holds is as good as freed
    assert later.ending is None
    live.matchers.remove(bad[1])
    live.matchers.remove(bad[1])
    live.matchers.remove(later)
    assert live.matchers.num_bytes == 76 * MIB


def test_two_looks_at_the_process_are_apart(vocabulary: Vocabulary) -> None:
    live = Live(vocabulary, 10 * MIB)
    matches = [live.add("a", 9 * MIB), live.add("a", 8 * MIB)]
    live.process_bytes += 99 * MIB
    ended = []
    for seconds in (0.01, 0.01, 0.05, 0.01, 0.05):
        matches.append(live.add("a", 7 * MIB, seconds))
        ended.append(sum(match.ending is not None for match in matches))
    assert ended == [0, 0, 1, 1, 2]


@pytest.fixture
def grammars() -> Iterator[Grammars]:
    made = Grammars(lambda: SAMPLE_MODEL, MODEL, 1, GrammarLimits(max_live_bytes=48 * MIB))
    yield made
    made.close()


def test_a_tenants_automata_end_before_they_fill_the_memory(grammars: Grammars) -> None:
    def opened(constraint: Constraint, tenant: str) -> GrammarMatch:
        return wait_for(grammars, grammars.open(make_request(constraint=constraint, tenant=tenant), None))

    rng = random.Random(1)
    warm = opened(SMALL, "good")
    grammars.end(warm)
    gc.collect()
    before = most = allocated_bytes()
    good = opened(regex("[a-z]{1,9999}"), "good")
    bad = [opened(regex(f"([a-z]*[aeiou][a-z]{{40}}){{{10 + index}}}"), "bad") for index in range(4)]
    ended = []
    for _ in range(400):
        live = [match for match in (good, *bad) if match.error is None and not match.ended]
        for match in live:
            allowed = np.flatnonzero(np.unpackbits(match.mask.view(np.uint8), bitorder="little")).tolist()
            grammars.advance(match, rng.choice([token for token in allowed if token != 2] or allowed))
        for match in live:
            wait_for(grammars, match)
            if match.error is not None:
                ended.append(match)
                grammars.end(match)
        bad = [match for match in bad if match.error is None]
        del live
        most = max(most, allocated_bytes())
    assert good.error is None
    assert any("the largest of its tenant" in str(match.error) for match in ended), ended
    assert all(isinstance(match.error, InvalidRequest) for match in ended)
    assert most - before < 96 * MIB
