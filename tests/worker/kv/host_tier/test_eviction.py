"""The eviction policies of host memory, driven through its slots."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from baton.worker.core import BlockHash
from baton.worker.kv.host_tier.eviction.arc import Arc
from baton.worker.kv.host_tier.eviction.interface import EvictionPolicy
from baton.worker.kv.host_tier.eviction.lru import Lru
from baton.worker.kv.host_tier.eviction.table import POLICIES
from baton.worker.kv.host_tier.slots import HostTier


def hash_of(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "little"))


def hits(policy: EvictionPolicy, num_slots: int, trace: Sequence[int]) -> list[bool]:
    """Reads blocks one after the other, and keeps those that were not there. Returns which were there."""
    tier = HostTier(num_slots, policy=policy)
    found = []
    for number in trace:
        found.append(bool(tier.lookup([hash_of(number)])))
        if found[-1]:
            tier.use(hash_of(number))
        else:
            begun = tier.begin(hash_of(number))
            assert begun is not None
            assert tier.landed(begun.slots[0])
    tier.audit([])
    return found


class PublishedArc:
    """The algorithm as the paper prints it (Figure 4), on lists whose last element was used last."""

    def __init__(self, c: int) -> None:
        self.c, self.p = c, 0.0
        self.t1: list[int] = []
        self.t2: list[int] = []
        self.b1: list[int] = []
        self.b2: list[int] = []

    def request(self, x: int) -> bool:
        t1, t2, b1, b2, c = self.t1, self.t2, self.b1, self.b2, self.c
        if x in t1 or x in t2:  # case I
            (t1 if x in t1 else t2).remove(x)
            t2.append(x)
            return True
        if x in b1:  # case II
            self.p = min(self.p + max(len(b2) / len(b1), 1.0), c)
            self.replace(x)
            b1.remove(x)
            t2.append(x)
            return False
        if x in b2:  # case III
            self.p = max(self.p - max(len(b1) / len(b2), 1.0), 0.0)
            self.replace(x)
            b2.remove(x)
            t2.append(x)
            return False
        if len(t1) + len(b1) == c:  # case IV
            if len(t1) < c:
                del b1[0]
                self.replace(x)
            else:
                del t1[0]
        elif len(t1) + len(t2) + len(b1) + len(b2) >= c:
            if len(t1) + len(t2) + len(b1) + len(b2) == 2 * c:
                del b2[0]
            self.replace(x)
        t1.append(x)
        return False

    def replace(self, x: int) -> None:
        t1 = self.t1
        if t1 and (len(t1) > self.p or (x in self.b2 and len(t1) == self.p)):
            self.b1.append(t1.pop(0))
        else:
            self.b2.append(self.t2.pop(0))


@given(st.integers(1, 8), st.lists(st.integers(0, 14), max_size=200))
def test_arc_finds_what_the_published_algorithm_finds(num_slots: int, trace: list[int]):
    published = PublishedArc(num_slots)
    assert hits(Arc(num_slots), num_slots, trace) == [published.request(number) for number in trace]


def test_arc_keeps_what_returns_beside_texts_that_come_once():
    # 40 shared blocks return, each time after 100 blocks that are asked for once; host memory has room for 80.
    shared = list(range(40))
    trace = shared + shared
    for round_ in range(20):
        trace += range(1000 + 100 * round_, 1100 + 100 * round_)
        trace += shared
    lru, arc = (sum(hits(policy(80), 80, trace)) for policy in (Lru, Arc))
    assert lru == 40  # only those of the second round
    assert arc == 40 + 20 * 40


def test_arc_learns_to_follow_recency_within_a_round():
    # Each block is asked for again soon after it came, and never later.
    trace = [number for first in range(0, 400, 10) for number in [*range(first, first + 10)] * 2]
    lru, arc = (hits(policy(20), 20, trace) for policy in (Lru, Arc))
    assert sum(lru) == 400
    assert arc[60:] == lru[60:]  # the first round that does not fit shows it what pays


def test_a_block_that_only_leaves_the_device_does_not_count_as_used():
    tier = HostTier(2, policy=Arc(2))
    for number in (1, 2):
        begun = tier.begin(hash_of(number))
        assert begun is not None
        tier.landed(begun.slots[0])
    tier.use(hash_of(1))
    tier.touch(hash_of(2))
    begun = tier.begin(hash_of(3))
    assert begun is not None
    assert begun.evicted == [hash_of(2)]


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_failed_copy_leaves_no_trace_in_a_policy(name: str):
    tier = HostTier(1, policy=POLICIES[name](1))
    for number in (1, 1, 2):
        begun = tier.begin(hash_of(number))
        assert begun is not None
        tier.fail(begun.slots[0])
    begun = tier.begin(hash_of(3))
    assert begun is not None
    assert begun.evicted == []


class PolicyMachine(RuleBasedStateMachine):
    """States of several slots, copies that fail, and resets: policies and slots agree on what is findable."""

    @initialize(name=st.sampled_from(sorted(POLICIES)), num_slots=st.integers(3, 12))
    def start(self, name: str, num_slots: int) -> None:
        self.policy = POLICIES[name](num_slots)
        self.tier = HostTier(num_slots, policy=self.policy)
        self.kept: set[BlockHash] = set()

    @rule(number=st.integers(0, 20), succeeds=st.booleans())
    def copy(self, number: int, succeeds: bool) -> None:
        known = hash_of(number)
        if known in self.tier:
            self.tier.use(known)
            return
        begun = self.tier.begin(known, 1 + number % 3)  # a block always has the same size
        assert begun is not None
        self.kept -= set(begun.evicted)
        if succeeds:
            assert all(map(self.tier.landed, begun.slots))
            self.kept.add(known)
        else:
            for slot in begun.slots:
                self.tier.fail(slot)

    @rule(number=st.integers(0, 20))
    def leave_the_device(self, number: int) -> None:
        self.tier.touch(hash_of(number))

    @rule()
    def reset(self) -> None:
        self.tier.reset()
        self.kept.clear()

    @invariant()
    def victims_are_exactly_the_findable_blocks(self) -> None:
        victims = list(self.policy.victims())
        assert len(victims) == len(set(victims))
        assert set(victims) == self.kept
        self.tier.audit([])


TestPoliciesUnderRandomTraffic = PolicyMachine.TestCase
