"""Requests cancelled and workers killed at random phases of the hand-over: nothing leaks, nothing is late or wrong."""

from __future__ import annotations

import pytest
from bench.transfer.churn import churn, clean, table


@pytest.mark.timeout(300)
def test_hundreds_of_requests_of_churn_leave_nothing_behind() -> None:
    report = churn(300, seed=7, kill_every=3)
    assert clean(report), table(report)
    assert report.outcomes["cancelled"] > 50
    assert report.outcomes["finished"] > 20
    assert sum(report.kills.values()) >= 1
    assert report.transfers["transfers completed"] > 20
