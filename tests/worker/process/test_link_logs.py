"""The way of the engine's log records to its front."""

import logging
import threading

import pytest

from baton.worker.link.frames import Kind
from baton.worker.process.logs import LinkLogHandler


class Link:
    """Keeps what is sent at once and what goes with the next frames."""

    def __init__(self):
        self.posted, self.queued = [], []

    def post(self, kind, channel=0, payload=b""):
        self.posted.append((kind, payload))

    def send(self, kind, channel=0, payload=b""):
        self.queued.append((kind, payload))


@pytest.fixture
def logger():
    logger = logging.Logger("engine")
    logger.link = Link()
    logger.addHandler(LinkLogHandler(logger.link))
    return logger


def test_what_is_said_of_a_request_goes_with_the_next_frames(logger):
    logger.info("request finished", extra={"request_id": "r1#e7"})
    ((kind, payload),) = logger.link.queued
    assert kind == Kind.LOG
    assert b'"request_id": "r1"' in payload
    assert not logger.link.posted


def test_all_else_is_sent_at_once(logger):
    logger.info("loading weights")
    logger.warning("request refused", extra={"request_id": "r1"})
    other = threading.Thread(target=lambda: logger.info("compiled", extra={"request_id": "r1"}))
    other.start()
    other.join()
    assert [kind for kind, _ in logger.link.posted] == [Kind.LOG] * 3
    assert not logger.link.queued
