"""When an engine's state is read, sent, and looked at again."""

import pytest

from baton.v1 import worker_pb2
from baton.worker.process.state_reporter import StateReporter


@pytest.fixture
def reporter():
    sent = []
    made = StateReporter(lambda: worker_pb2.WorkerState(epoch=made.epoch), sent.append)
    made.epoch, made.sent = 1, sent
    made.report(100.0, at_once=True)
    return made


def test_a_state_that_has_not_changed_is_not_due_again_at_once(reporter):
    """The engine sleeps until then: a deadline that has passed would have it spin while a grammar is compiled."""
    now = 100.0
    for _ in range(8):
        now = reporter.deadline(changing=True)
        reporter.report(now)
        assert reporter.deadline(changing=True) == pytest.approx(now + 0.1)
    assert len(reporter.sent) == 1


def test_a_changed_state_is_sent_a_tenth_of_a_second_later_at_most(reporter):
    reporter.report(100.1)
    reporter.epoch = 2
    reporter.report(100.15)
    assert len(reporter.sent) == 1
    reporter.report(reporter.deadline(changing=True))
    assert len(reporter.sent) == 2
    assert reporter.deadline(changing=True) == pytest.approx(100.3)


def test_an_unchanged_state_is_sent_once_a_second(reporter):
    for tick in range(1, 31):
        reporter.report(100.0 + 0.1001 * tick)
    assert len(reporter.sent) == 4
    assert reporter.deadline(changing=False) == pytest.approx(104.003)


def test_a_state_is_sent_at_once_where_that_is_asked(reporter):
    reporter.report(100.01, at_once=True)
    assert len(reporter.sent) == 2
