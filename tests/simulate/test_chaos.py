"""Faults by seed against the real index path; `make chaos-sim` runs many more seeds, for longer."""

import os
import subprocess
import sys

import pytest

from baton.kvstore.index import watch
from baton.services.cli import main
from baton.services.simulate.chaos.checker import STEADY, Counts
from baton.services.simulate.chaos.runs import run_chaos
from baton.services.simulate.chaos.simulation import ChaosReport, ChaosTotals


@pytest.mark.parametrize("seed", range(3))
def test_the_index_is_right_a_second_after_any_fault(seed):
    report = run_chaos(seed)
    assert report.problems == []
    assert report.faults
    assert report.counts[STEADY].num_believed > 0
    assert len(report.truth_seconds) >= len(report.faults)


def test_a_message_lost_while_all_is_quiet_is_waited_for():
    """Three hellos of one worker are lost, the last one after the traffic."""
    report = run_chaos(645)
    assert any("drop messages of w01" in fault for fault in report.faults)
    assert report.problems == []


def test_seeds_together_believe_in_next_to_no_phantoms_while_nothing_is_broken():
    totals = ChaosTotals()
    for seed in range(20, 28):
        totals.add(run_chaos(seed))
    assert totals.num_bad == 0
    assert totals.counts[STEADY].num_believed > 3000
    assert totals.counts[STEADY].phantom_rate < 0.002


def test_an_eviction_on_its_way_is_no_fault():
    """Decisions fall between an eviction and its arrival, in some seed."""
    met = next(one for one in map(run_chaos, range(20, 80)) if one.counts[STEADY].num_phantom)
    assert met.problems == []


def test_a_late_eviction_event_is_detected(monkeypatch):
    monkeypatch.setattr(watch, "_GATHER_SECONDS", 0.03)
    problems = (problem for one in map(run_chaos, range(20, 80)) for problem in one.problems)
    assert "is believed, in steady times" in next(problems)


@pytest.mark.parametrize(
    ("num_phantom", "num_believed", "is_right"), [(999, 10**6, True), (1100, 10**6, False), (50, 1000, True)]
)
def test_of_all_seeds_together_one_block_in_a_thousand_may_be_a_phantom(num_phantom, num_believed, is_right):
    counts = Counts(num_decisions=1, num_believed=num_believed, num_phantom=num_phantom)
    totals = ChaosTotals()
    totals.add(ChaosReport(0, [], 0, 0, {STEADY: counts}))
    assert (totals.problem == "") is is_right


def test_chaos_replays_from_its_seed_in_any_process():
    def run(seed, hash_seed):
        command = [sys.executable, "-m", "baton.services.cli", "simulate", "--chaos", seed, "--chaos-seconds", "4"]
        environ = {**os.environ, "PYTHONHASHSEED": hash_seed}
        return subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout

    first = run("7", "1")
    assert first.startswith("seed 7: ")
    assert first == run("7", "2")


def test_an_index_without_events_is_detected(monkeypatch):
    """The checker itself: a router whose index takes no removals believes in phantoms."""
    from baton.router.index.prefix_index import PrefixIndex

    apply_all = PrefixIndex.apply_all

    def deaf(self, batches):
        kept = []
        for batch in batches:
            events = [event for event in batch.events if not event.HasField("removed")]
            del batch.events[:]
            batch.events.extend(events)
            kept.append(batch)
        return apply_all(self, kept)

    monkeypatch.setattr(PrefixIndex, "apply_all", deaf)
    report = run_chaos(1)
    assert any("is believed" in problem for problem in report.problems)
    assert any("the router's index has" in problem for problem in report.problems)


def test_the_command_prints_a_line_a_seed(capsys):
    assert main(["simulate", "--chaos", "1", "--chaos-seeds", "2", "--chaos-seconds", "3", "--jobs", "1"], {}) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[:2]] == ["seed 1", "seed 2"]
    assert lines[-1] == "2 seeds, 0 with problems"
