import json
import logging

import pytest

from baton.services.process.logs import JsonFormatter, TextFormatter
from baton.services.up.start_log import Progress, StartLog, message_of


@pytest.mark.parametrize("formatter", [TextFormatter("worker"), JsonFormatter("worker")])
def test_messages_are_read_in_both_formats_of_logs(formatter):
    record = logging.LogRecord("baton.worker.x", logging.INFO, "f", 1, "start: weights in %.1f s", (1.2,), None)
    assert message_of(formatter.format(record)) == "start: weights in 1.2 s"


@pytest.mark.parametrize("line", ["", "Traceback (most recent call last):", "{", json.dumps([1]), "  at x: y"])
def test_other_lines_have_no_message(line):
    assert message_of(line) == ""


def test_ended_phases_are_returned_once_and_the_running_one_is_progress(tmp_path):
    def say(text):
        with path.open("a") as log:
            log.write(f"2026-01-01T00:00:00.000Z INFO    worker worker.x: {text}\n")

    path = tmp_path / "log"
    path.touch()
    log = StartLog(path)
    assert (log.read(), log.progress) == ([], None)
    say("hello")
    say("start: weights in 1.0 s")
    say("start: graphs, 4 of 20")
    assert log.read() == ["weights in 1.0 s"]
    assert log.progress == Progress("graphs", 4, 20)
    say("start: graphs in 2.0 s")
    assert log.read() == ["graphs in 2.0 s"]
    assert log.progress is None
    assert log.read() == []


def test_a_line_that_is_still_written_is_read_when_it_is_whole(tmp_path):
    path = tmp_path / "log"
    path.write_text("2026-01-01T00:00:00.000Z INFO    worker worker.x: start: graphs, 1 of")
    log = StartLog(path)
    assert (log.read(), log.progress) == ([], None)
    with path.open("a") as file:
        file.write(" 2\n")
    log.read()
    assert log.progress == Progress("graphs", 1, 2)
