import logging

import pytest

from baton.services.process.logs import JsonFormatter, TextFormatter
from baton.services.up.start_log import Progress, StartLog, messages_of

FORMATTERS = pytest.mark.parametrize("formatter", [TextFormatter("worker"), JsonFormatter("worker")])
REPORT = "this worker:\n  model       tales, Llama\n  off         graphs: a CPU"


def logged(formatter, message, *arguments, **extra):
    record = logging.LogRecord("baton.worker.x", logging.INFO, "f", 1, message, arguments, None)
    vars(record).update(extra)
    return formatter.format(record) + "\n"


@pytest.fixture
def log(tmp_path):
    (tmp_path / "log").touch()
    return StartLog(tmp_path / "log")


def say(log, text):
    with log._path.open("a") as file:
        file.write(text)


@FORMATTERS
def test_messages_are_read_in_both_formats_of_logs(formatter):
    lines = (logged(formatter, "start: weights in %.1f s", 1.2) + logged(formatter, "b\nc")).splitlines()
    assert list(messages_of(lines)) == ["start: weights in 1.2 s", "b\nc"]


@FORMATTERS
def test_ended_phases_are_returned_once_and_the_running_one_is_progress(log, formatter):
    assert (log.read(), log.progress) == ([], None)
    say(
        log, "".join(logged(formatter, text) for text in ("hello", "start: weights in 1.0 s", "start: graphs, 4 of 20"))
    )
    assert log.read() == ["weights in 1.0 s"]
    assert log.progress == Progress("graphs", 0.2, "4 of 20")
    say(log, logged(formatter, "start: graphs in 2.0 s"))
    assert log.read() == ["graphs in 2.0 s"]
    assert log.progress is None
    assert log.read() == []


@FORMATTERS
def test_the_bytes_of_weights_are_progress(log, formatter):
    say(log, logged(formatter, "weights: 1.5 of 3.0 GB, 0.85 GB/s"))
    assert log.read() == []
    assert log.progress == Progress("weights", 0.5, "1.5 of 3.0 GB, 0.85 GB/s")


@pytest.mark.parametrize(
    ("formatter", "lines"),
    [
        (TextFormatter("worker"), ["  model       tales, Llama", "  off         graphs: a CPU"]),
        (JsonFormatter("worker"), ["  model                tales", "  kv_tokens            16"]),
    ],
)
def test_the_report_of_a_worker_is_returned_line_by_line(log, formatter, lines):
    report = {"model": "tales", "kv_tokens": 16, "kernels": [{"op": "attend"}]}
    say(log, logged(formatter, REPORT, report=report) + logged(formatter, "listening"))
    assert log.read() == lines


@pytest.mark.parametrize("line", ["", "Traceback (most recent call last):", "{", "[1]", '{"a": 1}', "  at x: y"])
def test_other_lines_are_not_shown(log, line):
    say(log, line + "\n")
    assert (log.read(), log.progress) == ([], None)


def test_a_line_that_is_still_written_is_read_when_it_is_whole(log):
    whole = logged(TextFormatter("worker"), "start: graphs, 1 of 2")
    say(log, whole[:-3])
    assert (log.read(), log.progress) == ([], None)
    say(log, whole[-3:])
    log.read()
    assert log.progress == Progress("graphs", 0.5, "1 of 2")
