"""A logging configuration file of the operator's own."""

import json
import logging

import pytest

from baton.services.process.logs import LogConfigError, configure


@pytest.fixture(autouse=True)
def root_logger():
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = before


def written(folder, content):
    path = folder / "log.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_the_file_decides_where_records_go(tmp_path):
    target = tmp_path / "out.log"
    settings = {
        "formatters": {"short": {"format": "%(levelname)s|%(message)s"}},
        "handlers": {"file": {"class": "logging.FileHandler", "filename": str(target), "formatter": "short"}},
        "root": {"level": "WARNING", "handlers": ["file"]},
    }
    configure("gateway", "text", "debug", config_file=written(tmp_path, settings))
    logging.getLogger("baton.x").info("hidden")
    logging.getLogger("baton.x").warning("shown")
    assert target.read_text() == "WARNING|shown\n"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "cannot read"),
        ([1], "must hold a JSON object, not list"),
        ({"handlers": {"x": {"class": "nothing.Here"}}}, "handler 'x'"),
        ({"root": {"level": "LOUD"}}, "LOUD"),
        ({"version": 2}, "version"),
    ],
)
def test_a_wrong_file_is_named_with_its_problem(tmp_path, content, problem):
    with pytest.raises(LogConfigError, match=problem) as refused:
        configure("gateway", "text", "info", config_file=written(tmp_path, content))
    assert "log.json" in str(refused.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(LogConfigError, match=r"missing\.json"):
        configure("gateway", "text", "info", config_file=str(tmp_path / "missing.json"))
