"""The stages of a neighbour's first token add up to the time that it took."""

import pytest
from attack.stages import FirstToken, show_slowest, stages_of
from support.network.otlp_collector import Collector, Span

MS = 1_000_000
TRACE = "ab" * 16
PARTS = {
    "baton.gateway.request": (2, 60),
    "baton.gateway.prepare": (2, 5),
    "baton.gateway.place": (5, 12),
    "baton.router.place": (7, 8),
    "baton.worker.queue": (16, 21),
    "baton.worker.prefill": (21, 27),
}
TOKEN = FirstToken(0, 35 * MS, TRACE)


def span(name):
    start, end = PARTS[name]
    return Span(name, "", "", TRACE, "", "", start * MS, end * MS, {}, False)


def test_stages_add_up_to_the_time_of_the_first_token():
    stages = stages_of(TOKEN, [span(name) for name in PARTS])
    assert {name: round(1000 * seconds) for name, seconds in stages.items()} == {
        "receive": 2, "prepare": 3, "place": 7, "of it router": 1, "submit": 4, "queue": 5, "prefill": 6, "return": 8,
    }  # fmt: skip
    assert sum(stages.values()) - stages["of it router"] == pytest.approx(TOKEN.seconds)


@pytest.mark.parametrize("missing", sorted(PARTS.keys() - {"baton.router.place"}))
def test_a_request_without_all_spans_has_no_stages(missing):
    assert stages_of(TOKEN, [span(name) for name in PARTS if name != missing]) == {}


def test_the_slowest_are_shown_first(monkeypatch):
    monkeypatch.setattr("attack.stages._EXPORT_SECONDS", 0.0)
    collector = Collector(spans=[span(name) for name in PARTS])
    table = show_slowest([FirstToken(0, MS, "none"), TOKEN], collector, 2).splitlines()
    assert " 35.0 " in table[2]
    assert " ? " in table[3]
