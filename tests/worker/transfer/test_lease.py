"""The lease's state machine: single transitions, and a model that loses, delays, doubles and reorders every message."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.worker.transfer.lease import (
    FORCE_SECONDS,
    GRACE_SECONDS,
    SETTLE_SECONDS,
    Action,
    ReceiverLease,
    SenderLease,
    State,
)

LEASE = 1.0
STALL = 5.0
NUM_PIECES = 3


def receiver(fences_locally: bool = True) -> ReceiverLease:
    return ReceiverLease(0.0, LEASE, STALL, fences_locally)


def sender() -> SenderLease:
    return SenderLease(0.0, LEASE, STALL)


@pytest.mark.parametrize("landed_first", [True, False])
def test_a_receiver_completes_when_all_landed_and_the_counts_agree(landed_first):
    lease = receiver()
    steps = [lambda: lease.landed(0.1, 3, 300), lambda: lease.sent(0.1, 3, 300)]
    first, second = steps if landed_first else reversed(steps)
    assert first() == ()
    assert second() == (Action.COMMIT, Action.SEND_COMPLETE)
    assert lease.state is State.COMPLETE
    assert lease.deadline == math.inf


def test_a_receiver_never_commits_when_the_counts_differ():
    lease = receiver()
    lease.landed(0.1, 3, 300)
    assert lease.sent(0.1, 4, 300) == (Action.SEND_ABORT, Action.FENCE)
    assert "(3, 300)" in lease.reason
    assert lease.fenced() == (Action.FREE,)


def test_a_sender_frees_when_the_receiver_has_it_all():
    lease = sender()
    assert lease.pushed(0.1) == (Action.SEND_SENT,)
    assert lease.completed() == (Action.FREE,)
    assert lease.state is State.COMPLETE


@pytest.mark.parametrize("fences_locally", [True, False])
def test_a_receiver_keeps_its_blocks_until_the_fence(fences_locally):
    lease = receiver(fences_locally)
    actions = lease.cancel(0.1, "aborted")
    assert Action.SEND_ABORT in actions
    assert Action.FREE not in actions
    if not fences_locally:
        assert Action.FENCE not in actions
        assert lease.aborted(0.2) == (Action.FENCE,)
    assert lease.fenced() == (Action.FREE,)
    assert lease.fenced() == ()


def test_a_receiver_whose_peer_never_answers_fences_without_it():
    lease = receiver(fences_locally=False)
    lease.cancel(0.0, "aborted")
    assert lease.tick(GRACE_SECONDS - 0.01) == ()
    assert lease.tick(GRACE_SECONDS) == (Action.FENCE,)
    assert lease.tick(GRACE_SECONDS + FORCE_SECONDS) == (Action.FORCE_FENCE,)
    assert lease.tick(GRACE_SECONDS + 2 * FORCE_SECONDS) == (Action.FORCE_FENCE,)
    assert lease.fenced() == (Action.FREE,)


@pytest.mark.parametrize("make", [receiver, sender])
def test_silence_ends_a_lease_and_signs_of_life_do_not(make):
    lease = make()
    lease.renew(0.9)
    assert lease.tick(1.8) == ()
    assert lease.tick(1.9) == (Action.SEND_ABORT, Action.FENCE)
    assert lease.expired


@pytest.mark.parametrize("make", [receiver, sender])
def test_a_peer_that_lives_but_makes_no_progress_is_given_up(make):
    lease = make()
    for tenth in range(1, 50):
        lease.renew(tenth / 10)
        assert lease.tick(tenth / 10) == ()
    lease.renew(STALL)
    assert Action.FENCE in lease.tick(STALL)
    assert not lease.expired


def test_pieces_that_were_sent_and_never_land_are_given_up_soon():
    lease = receiver()
    lease.sent(0.5, 3, 300)
    lease.renew(0.5 + SETTLE_SECONDS)
    assert lease.tick(0.4 + SETTLE_SECONDS) == ()
    lease.progressed(1.0)
    assert lease.tick(0.5 + SETTLE_SECONDS) == ()
    assert Action.FENCE in lease.tick(1.0 + SETTLE_SECONDS)


def test_a_peers_silence_is_ignored_while_nothing_is_read_but_at_most_for_a_lease():
    lease = receiver()
    lease.ignore_gap(0.8, 0.5)
    assert lease.tick(1.4) == ()
    assert Action.FENCE in lease.tick(1.5)
    fresh = receiver()
    fresh.ignore_gap(0.0, 60.0)
    assert fresh.deadline == LEASE


@pytest.mark.parametrize("make", [receiver, sender])
def test_a_lost_stream_is_no_reason_to_send_anything(make):
    lease = make()
    assert lease.peer_lost(0.1) == (Action.FENCE,)
    assert lease.fenced() == (Action.FREE,)


def test_a_stream_lost_while_waiting_for_the_answer_fences_at_once():
    lease = receiver(fences_locally=False)
    lease.cancel(0.1, "aborted")
    assert lease.peer_lost(0.2) == (Action.FENCE,)
    assert lease.fenced() == (Action.FREE,)


def test_a_sender_answers_an_abort_only_after_its_fence():
    lease = sender()
    assert lease.peer_aborts(0.1, "why") == (Action.FENCE,)
    assert lease.fenced() == (Action.FREE, Action.SEND_ABORTED)
    assert lease.peer_aborts(0.2, "again") == (Action.SEND_ABORTED,)


@dataclass
class End:
    """One worker: a lease, its transport, and its blocks."""

    lease: ReceiverLease | SenderLease
    is_receiver: bool
    alive: bool = True
    blocks: str = "leased"  # leased | committed | free
    fencing: bool = False  # the transport was asked
    broken_at: float = math.inf
    freed_at: float = math.inf
    inbox: list[str] = field(default_factory=list)


class LeaseModel(RuleBasedStateMachine):
    """Two ends, a network that does everything wrong that it can, and a one-sided or two-sided transport."""

    @initialize(fences_locally=st.booleans())
    def start(self, fences_locally: bool) -> None:
        self.now = 0.0
        self.one_sided = not fences_locally
        self.receiver = End(ReceiverLease(0.0, LEASE, STALL, fences_locally), True)
        self.sender = End(SenderLease(0.0, LEASE, STALL), False)
        self.ends = (self.receiver, self.sender)
        self.stream = True
        self.num_to_push = NUM_PIECES
        self.wire = 0  # pieces that the sender has begun and that may still be written
        self.num_landed = 0
        self.corrupted = False
        self.window = True  # the receiver's memory takes writes

    # What the actions do.

    def act(self, end: End, actions: tuple[Action, ...]) -> None:
        for action in actions:
            if action in (Action.FENCE, Action.FORCE_FENCE):
                self.fence(end, force=action is Action.FORCE_FENCE)
            elif action is Action.FREE:
                assert end.blocks == "leased", "freed twice"
                end.blocks, end.freed_at = "free", self.now
            elif action is Action.COMMIT:
                assert end.blocks == "leased"
                end.blocks = "committed"
            else:
                assert self.stream or action in (Action.SEND_ABORTED,), f"{action} over a lost stream"
                self.send(end, action.name)
        if not end.lease.live and end.broken_at == math.inf:
            end.broken_at = self.now

    def fence(self, end: End, force: bool) -> None:
        end.fencing = True
        if force:
            self.fenced(end)

    def fenced(self, end: End) -> None:
        if end.is_receiver:
            self.window = False
        else:
            self.num_to_push = 0
        if not end.is_receiver and self.one_sided:
            self.wire = 0  # with two sides they are in the kernel's buffers, and the receiver discards them
        end.fencing = False
        self.act(end, end.lease.fenced())

    def send(self, end: End, name: str) -> None:
        other = self.sender if end is self.receiver else self.receiver
        if self.stream and other.alive:
            other.inbox.append(name)

    def receive(self, end: End, name: str) -> None:
        lease, now = end.lease, self.now
        lease.renew(now)
        if name == "SEND_SENT":
            self.act(end, lease.sent(now, NUM_PIECES, NUM_PIECES * 100))
        elif name == "SEND_COMPLETE":
            self.act(end, lease.completed())
        elif name == "SEND_ABORT":
            self.act(end, lease.peer_aborts(now, "the model"))
        elif name == "SEND_ABORTED" and end.is_receiver:
            self.act(end, lease.aborted(now))

    # What can happen.

    @rule(num_steps=st.integers(1, 12))
    def go_well(self, num_steps: int) -> None:
        """Runs an undisturbed transfer."""
        for _ in range(num_steps):
            if self.wire:
                self.land()
            elif self.num_to_push and self.sender.alive:
                self.push()
            elif self.sender.alive and self.sender.lease.live and self.sender.lease.state is State.OPEN:
                self.all_pushed()
            for which, end in enumerate(self.ends):
                if end.inbox:
                    self.deliver(which, 0, False)

    @rule(which=st.integers(0, 1), index=st.integers(0, 50), keep=st.booleans())
    def deliver(self, which: int, index: int, keep: bool) -> None:
        """Any message, in any order; kept: it comes once more."""
        end = self.ends[which]
        if end.alive and end.inbox:
            name = end.inbox[index % len(end.inbox)]
            if not keep:
                end.inbox.remove(name)
            self.receive(end, name)

    @rule(which=st.integers(0, 1))
    def lose(self, which: int) -> None:
        if self.ends[which].inbox:
            self.ends[which].inbox.pop()

    @precondition(lambda self: self.sender.alive and self.num_to_push > 0)
    @rule()
    def push(self) -> None:
        self.num_to_push -= 1
        self.wire += 1

    @precondition(lambda self: self.wire > 0)
    @rule()
    def land(self) -> None:
        """A piece reaches the receiver's memory, if that takes it."""
        self.wire -= 1
        if not self.window or not self.receiver.alive:
            return
        assert self.receiver.blocks == "leased", "a write into blocks that are not leased any more"
        self.num_landed += 1
        if self.num_landed == NUM_PIECES and not self.corrupted:
            self.act(self.receiver, self.receiver.lease.landed(self.now, NUM_PIECES, NUM_PIECES * 100))
            self.window = False

    @precondition(lambda self: self.wire > 0 and self.window and self.receiver.alive)
    @rule()
    def corrupt(self) -> None:
        self.wire -= 1
        self.corrupted = True
        self.act(self.receiver, self.receiver.lease.cancel(self.now, "a checksum does not match"))

    @precondition(lambda self: self.sender.alive and self.num_to_push == 0 and self.sender.lease.live)
    @rule()
    def all_pushed(self) -> None:
        self.act(self.sender, self.sender.lease.pushed(self.now))

    @rule(which=st.integers(0, 1))
    def finish_fence(self, which: int) -> None:
        if self.ends[which].fencing and self.ends[which].alive:
            self.fenced(self.ends[which])

    @rule(which=st.integers(0, 1))
    def report_a_fence_again(self, which: int) -> None:
        end = self.ends[which]
        if end.alive and end.blocks != "leased":
            self.act(end, end.lease.fenced())

    @rule(which=st.integers(0, 1))
    def cancel(self, which: int) -> None:
        end = self.ends[which]
        if end.alive:
            self.act(end, end.lease.cancel(self.now, "the model"))

    @rule()
    def cut_stream(self) -> None:
        self.stream = False
        for end in self.ends:
            end.inbox.clear()
            if end.alive:
                self.act(end, end.lease.peer_lost(self.now))

    @rule(which=st.integers(0, 1), seen=st.booleans())
    def crash(self, which: int, seen: bool) -> None:
        """A process dies; unseen: as a frozen one, whose streams stay."""
        end = self.ends[which]
        end.alive = False
        if end is self.sender:
            self.num_to_push = 0
        if seen:
            self.cut_stream()

    @rule()
    def renew(self) -> None:
        if self.stream and self.receiver.alive and self.sender.alive:
            for end in self.ends:
                end.lease.renew(self.now)

    @rule(seconds=st.sampled_from([0.05, 0.3, 1.0]))
    def pass_time(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + 0.05)
            for end in self.ends:
                if end.alive:
                    self.act(end, end.lease.tick(self.now))

    # What must hold.

    @invariant()
    def a_commit_means_that_everything_landed(self) -> None:
        if self.receiver.blocks == "committed":
            assert self.num_landed == NUM_PIECES
            assert not self.corrupted

    @invariant()
    def blocks_that_are_not_leased_take_no_writes(self) -> None:
        assert self.receiver.blocks == "leased" or not self.window

    @invariant()
    def a_sender_that_freed_reads_nothing_more(self) -> None:
        if self.sender.blocks != "leased":
            assert self.num_to_push == 0

    @invariant()
    def a_broken_lease_ends_within_its_bound(self) -> None:
        for end in self.ends:
            if end.alive and end.broken_at < math.inf and end.blocks == "leased":
                assert self.now - end.broken_at <= GRACE_SECONDS + FORCE_SECONDS + 0.1

    def teardown(self) -> None:
        """However it went: left alone, both ends are over within the lease's time and the bound."""
        self.pass_time(LEASE + GRACE_SECONDS + 2 * FORCE_SECONDS + STALL)
        for end in self.ends:
            if end.alive:
                assert end.lease.ended
                assert end.blocks != "leased"
        self.blocks_that_are_not_leased_take_no_writes()


TestLeaseModel = LeaseModel.TestCase
TestLeaseModel.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
