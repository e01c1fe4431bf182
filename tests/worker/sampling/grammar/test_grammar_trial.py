"""Constraints that cost too much: refused from a process that can be killed, and a burden to their own tenant alone."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from support.sampling.grammar_rig import SAMPLE_MODEL, choices, json_schema, make_request, regex

from baton.rpc.errors import InternalError, InvalidRequest, Unsupported
from baton.worker.core import Constraint, ConstraintForm, ModelSpec
from baton.worker.sampling.grammar.fair_queue import FairQueue
from baton.worker.sampling.grammar.grammars import Grammars
from baton.worker.sampling.grammar.limits import GrammarLimits
from baton.worker.sampling.grammar.matching.match import GrammarMatch, Lane
from baton.worker.sampling.grammar.messages import constraint_message
from baton.worker.sampling.grammar.trial import attempt as trial
from baton.worker.sampling.grammar.trial.client import TrialAbandoned, Trials
from baton.worker.sampling.grammar.trial.framing import send_sized
from baton.worker.sampling.grammar.trial.verdict import Verdict
from baton.worker.sampling.grammar.vocabulary import load_vocabulary

MODEL = ModelSpec(bytes(16), 4096, 512, (2,))
LIMITS = GrammarLimits()


def endless(tag: str) -> Constraint:
    """Takes many seconds of CPU to compile."""
    patterns = {"type": "object", "patternProperties": {f"^{tag}{index}_.*x{index}$": {} for index in range(120)}}
    return json_schema({"type": "object", "properties": {f"k{index}": patterns for index in range(20)}})


ENDLESS = [endless(tag) for tag in "abcdef"]
TWO_SECONDS = regex("b(a{999}){50}(a{999}){50}(a{999}){50}")
SMALL = json_schema({"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]})


@pytest.fixture(scope="module")
def trials() -> Iterator[Trials]:
    made = Trials(lambda: SAMPLE_MODEL, MODEL, LIMITS)
    yield made
    made.close()


@pytest.fixture
def grammars() -> Iterator[Grammars]:
    made = Grammars(lambda: SAMPLE_MODEL, MODEL, 1)
    yield made
    made.close()


def children(trials: Trials) -> list[psutil.Process]:
    assert trials._process is not None
    return psutil.Process(trials._process.pid).children()


def open_for(grammars: Grammars, constraint: Constraint, tenant: str) -> GrammarMatch:
    return grammars.open(make_request(constraint=constraint, tenant=tenant), tenant)


def wait_for(grammars: Grammars, match: GrammarMatch, seconds: float = 60.0) -> float:
    """Returns the seconds until the match is ready."""
    began = time.monotonic()
    while not match.ready:
        assert time.monotonic() - began < seconds, "not compiled in time"
        grammars.settle(0.01)
    return time.monotonic() - began


def test_cheap_constraints_pass_with_their_cost(trials: Trials) -> None:
    verdict = trials.run(regex("[a-z]+@[a-z]+"))
    assert not verdict.problem
    assert verdict.grammar
    assert 0 < verdict.num_bytes < 1 << 20
    assert verdict.cpu_seconds < 0.2


@pytest.mark.parametrize("constraint", [ENDLESS[0], TWO_SECONDS, json_schema({"type": "integer", "multipleOf": 99991})])
def test_expensive_constraints_are_refused_within_the_limit(trials: Trials, constraint: Constraint) -> None:
    trials.run(regex("warm"))
    assert trials._process is not None
    before = psutil.Process(trials._process.pid).cpu_times()
    verdict = trials.run(constraint)
    assert verdict.problem.startswith(f"constraint.{constraint.form.value}: it")
    after = psutil.Process(trials._process.pid).cpu_times()
    spent = after.user + after.system + after.children_user + after.children_system
    spent -= before.user + before.system + before.children_user + before.children_system
    assert spent <= 0.5
    assert children(trials) == []


def test_the_trial_process_keeps_no_memory(trials: Trials) -> None:
    trials.run(regex("warm"))
    assert trials._process is not None
    process = psutil.Process(trials._process.pid)
    grown = []
    while len(grown) < 3 and min(grown, default=2 << 20) >= 2 << 20:  # what leaks does so in every round
        before = process.memory_info().rss
        for number in range(4):
            assert trials.run(regex(f"{number}(a{{200}}){{200}}")).problem
        grown.append(process.memory_info().rss - before)
    assert min(grown) < 2 << 20


def test_a_trial_ends_with_its_request(trials: Trials) -> None:
    trials.run(regex("warm"))
    over = threading.Event()
    threading.Timer(0.1, over.set).start()
    began = time.monotonic()
    with pytest.raises(TrialAbandoned):
        trials.run(ENDLESS[1], over.is_set)
    assert time.monotonic() - began < 10
    until = time.monotonic() + 20
    while children(trials) and time.monotonic() < until:
        time.sleep(0.01)
    assert children(trials) == []


def test_a_killed_process_is_started_again() -> None:
    made = Trials(lambda: SAMPLE_MODEL, MODEL, LIMITS)
    made.run(regex("a"))
    assert made._process is not None
    first = made._process.pid
    os.kill(first, signal.SIGKILL)
    assert not made.run(regex("b")).problem
    second = made._process.pid
    assert second != first
    made.close()
    made.close()
    assert not psutil.pid_exists(second)
    with pytest.raises(InternalError):
        made.run(regex("c"))


def test_a_defect_is_reported_from_the_trial_at_once(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(constraint: Constraint) -> str:
        raise RecursionError("too deep")

    monkeypatch.setattr(trial, "grammar_of_checked", fail)
    vocabulary = load_vocabulary(SAMPLE_MODEL, MODEL)
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        try:
            trial.attempt(theirs, vocabulary, LIMITS)
        finally:
            os._exit(0)
    theirs.close()
    with ours:
        send_sized(ours, constraint_message(SMALL).SerializeToString())
        verdict = Verdict.decode(ours.recv(1 << 16))
    os.waitpid(pid, 0)
    assert verdict.failure == "RecursionError: too deep"
    with pytest.raises(InternalError, match="RecursionError"):
        trials._judged(SMALL, verdict)


def test_the_process_has_one_thread_and_loads_no_torch(trials: Trials) -> None:
    trials.run(regex("a"))
    assert trials._process is not None
    process = psutil.Process(trials._process.pid)
    assert process.num_threads() == 1
    assert not [entry.path for entry in process.memory_maps() if "torch" in entry.path]


def test_a_tenants_costly_constraints_delay_no_other_tenant(grammars: Grammars) -> None:
    wait_for(grammars, open_for(grammars, regex("warm"), "good"))
    hostile = [open_for(grammars, constraint, "bad") for constraint in ENDLESS]
    time.sleep(0.1)
    # Neither a plain schema nor one that needs a trial waits for the six trials of the other.
    plain = wait_for(grammars, open_for(grammars, SMALL, "good"))
    tried = wait_for(grammars, open_for(grammars, regex("[a-z]{3}-[0-9]+"), "good"))
    still = [match for match in hostile if not match.ready]
    assert len(still) >= 2, (plain, tried)
    for match in hostile:
        grammars.end(match)
    for match in hostile:
        wait_for(grammars, match, 10)
    assert not grammars.pending


def test_an_abandoned_compilation_becomes_ready_at_once(grammars: Grammars) -> None:
    wait_for(grammars, open_for(grammars, regex("warm"), "me"))
    matches = [open_for(grammars, constraint, "me") for constraint in ENDLESS[:4]]
    time.sleep(0.1)
    for match in reversed(matches):
        grammars.end(match)
    for match in matches:
        assert wait_for(grammars, match, 5) < 1
    assert not grammars.pending


def test_a_refused_constraint_is_not_tried_again(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    tried, run = [], Trials.run

    def counted(trials: Trials, constraint: Constraint, *more: Any) -> Verdict:
        tried.append(constraint)
        return run(trials, constraint, *more)

    monkeypatch.setattr(Trials, "run", counted)
    first = open_for(grammars, ENDLESS[0], "me")
    wait_for(grammars, first)
    second = open_for(grammars, ENDLESS[0], "me")
    wait_for(grammars, second)
    assert tried == [ENDLESS[0]]
    for match in (first, second):
        assert isinstance(match.error, InvalidRequest)
        assert "CPU time" in match.error.message


@pytest.mark.parametrize(
    "constraint",
    [
        regex("(a{1000}){1000}"),
        regex("a{1000000000}"),
        Constraint(ConstraintForm.GRAMMAR, 'start: "a"{1000000000}'),
        Constraint(ConstraintForm.GRAMMAR, 'start: "a"~1..1000000000'),
        json_schema({"type": "object", "patternProperties": {f"^p{i}.*x{i}$": {} for i in range(200)}}),
        json_schema({"type": "string", "pattern": "((ab){300}){300}"}),
    ],
)
def test_the_obvious_is_refused_without_a_trial(grammars: Grammars, constraint: Constraint) -> None:
    match = open_for(grammars, constraint, "me")
    wait_for(grammars, match)
    assert isinstance(match.error, InvalidRequest)
    assert "at most" in match.error.message
    assert match.error.field == f"constraint.{constraint.form.value}"
    assert grammars._trials._process is None


def test_plain_constraints_need_no_process(grammars: Grammars) -> None:
    for constraint in (SMALL, choices("yes", "no"), Constraint(ConstraintForm.JSON_OBJECT)):
        match = open_for(grammars, constraint, "me")
        wait_for(grammars, match)
        assert match.error is None
        assert match.lane is Lane.PLAIN
    assert grammars._trials._process is None


def test_a_slow_grammar_leaves_the_lane_of_others(grammars: Grammars) -> None:
    def step(*matches: GrammarMatch) -> None:
        for match in matches:
            bits = np.unpackbits(match.mask.view(np.uint8), bitorder="little")
            bits[2] = 0
            grammars.advance(match, int(np.flatnonzero(bits)[0]))
        for match in matches:
            wait_for(grammars, match)

    slow = open_for(grammars, Constraint(ConstraintForm.GRAMMAR, 'start: start start | "a" | "b"'), "bad")
    quick = open_for(grammars, regex("[a-z]{1,9999}"), "good")
    wait_for(grammars, slow)
    wait_for(grammars, quick)
    while slow.error is None and slow.lane is not Lane.SLOW:
        step(slow, quick)
    assert slow.lane is Lane.SLOW
    assert quick.lane is Lane.OTHER


def test_owners_take_turns_and_leave_a_place() -> None:
    queue: FairQueue[int] = FairQueue(3)
    for number in range(4):
        queue.put(b"many", number)
    assert [queue.take(), queue.take()] == [(b"many", 0), (b"many", 1)]
    queue.put(b"few", 10)
    assert queue.take() == (b"few", 10)  # two places are the most that one owner gets
    queue.done(b"many")
    assert queue.take() == (b"many", 2)
    assert queue.remove(b"many", 3)
    assert not queue.remove(b"many", 3)
    queue.close()
    assert queue.take() is None


def test_a_single_slot_is_shared_too() -> None:
    queue: FairQueue[str] = FairQueue(1)
    queue.put(b"a", "x")
    queue.put(b"a", "y")
    queue.put(b"b", "z")
    order = []
    for _ in range(3):
        taken = queue.take()
        assert taken is not None
        order.append(taken[1])
        queue.done(taken[0])
    assert order == ["x", "z", "y"]


def test_the_engine_compiles_after_the_vocabulary_was_missing(tmp_path: Path) -> None:
    folders = [tmp_path, SAMPLE_MODEL, SAMPLE_MODEL]
    grammars = Grammars(lambda: folders.pop(0), MODEL, 1)
    first = open_for(grammars, regex("a"), "me")
    wait_for(grammars, first)
    assert first.error is not None
    second = open_for(grammars, regex("a"), "me")
    wait_for(grammars, second)
    assert second.error is None
    grammars.close()


def test_the_tokenizer_and_trial_process_are_ready_before_the_first_constraint() -> None:
    asked: list[Path] = []

    def find_folder() -> Path:
        asked.append(SAMPLE_MODEL)
        return SAMPLE_MODEL

    grammars = Grammars(find_folder, MODEL, 1)
    grammars.warm_up()
    until = time.monotonic() + 60
    while len(asked) < 2:  # the engine and the trial process
        assert time.monotonic() < until, "not prepared in time"
        time.sleep(0.01)
    match = open_for(grammars, regex("[a-z]+@[a-z]+"), "me")
    wait_for(grammars, match)
    assert match.error is None
    assert len(asked) == 2
    grammars.close()


def test_a_model_without_tokenizer_shows_at_the_first_constraint(tmp_path: Path) -> None:
    grammars = Grammars(lambda: tmp_path, MODEL, 1)
    grammars.warm_up()
    match = open_for(grammars, regex("a"), "me")
    wait_for(grammars, match)
    assert isinstance(match.error, Unsupported)
    grammars.close()
