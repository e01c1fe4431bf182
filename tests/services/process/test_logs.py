import io
import json
import logging

import pytest

from baton.services.process import logs


@pytest.fixture
def configured():
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    stream = io.StringIO()

    def configure(log_format, level="info"):
        logs.configure("racer", log_format, level, stream)
        return stream

    yield configure
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_json_line_has_the_message_the_service_and_every_extra_field(configured):
    stream = configured("json")
    logging.getLogger("baton.racer.lap").info("lap %d done", 3, extra={"request_id": "r-1", "seconds": 1.5})
    entry = json.loads(stream.getvalue())
    assert entry["message"] == "lap 3 done"
    assert entry["service"] == "racer"
    assert entry["level"] == "info"
    assert entry["logger"] == "baton.racer.lap"
    assert entry["request_id"] == "r-1"
    assert entry["seconds"] == 1.5
    assert entry["time"].endswith("Z")


def test_a_text_line_is_readable_and_has_the_extra_fields(configured):
    stream = configured("text")
    logging.getLogger("baton.racer").warning("slow", extra={"request_id": "r-1"})
    line = stream.getvalue()
    assert "WARNING racer racer: slow request_id=r-1\n" in line


def test_lines_below_the_level_are_dropped(configured):
    stream = configured("json", "warning")
    logging.getLogger("baton").info("quiet")
    assert stream.getvalue() == ""


def test_an_exception_stays_one_json_line(configured):
    stream = configured("json")
    try:
        raise ValueError("broken\nbaton")
    except ValueError:
        logging.getLogger("baton").exception("failed")
    (line,) = stream.getvalue().splitlines()
    assert "ValueError" in json.loads(line)["exception"]


def test_a_report_is_lines_for_people_and_an_object_for_programs(configured):
    record = {"msg": "this worker:\n  model  m", "extra": {"report": {"model": "m", "num_blocks": 3}}}
    text = configured("text")
    logging.getLogger("baton").info(record["msg"], extra=record["extra"])
    assert text.getvalue().endswith(": this worker:\n  model  m\n")
    stream = configured("json")
    stream.truncate(0)
    stream.seek(0)
    logging.getLogger("baton").info(record["msg"], extra=record["extra"])
    entry = json.loads(stream.getvalue())
    assert entry["message"] == "this worker"
    assert entry["report"] == record["extra"]["report"]
