"""Which publisher a worker has, when several claim it."""

import pytest

from baton.kvstore.index.publishers import Publisher, Publishers


@pytest.fixture
def publishers():
    return Publishers()


def test_the_higher_term_wins_for_any_replica(publishers):
    here, there = Publisher(5), Publisher(7, "other")
    assert publishers.claim("w", here)
    assert publishers.is_own("w")
    assert publishers.claim("w", there)
    assert not publishers.claim("w", here)
    assert publishers.get("w") is there
    assert not publishers.is_own("w")


def test_between_equal_terms_the_later_claim_wins(publishers):
    first, second = Publisher(5), Publisher(5)
    publishers.claim("w", first)
    assert publishers.claim("w", second)
    assert publishers.get("w") is second


def test_any_claim_wins_after_the_publisher_is_gone(publishers):
    publishers.claim("w", Publisher(9, "other"))
    publishers.end("w")
    assert publishers.term("w") == 0
    assert not publishers.is_live("w")
    assert list(publishers.of_replica("other")) == ["w"], "it stays named"
    assert publishers.claim("w", Publisher(1))
    assert publishers.term("w") == 1


def test_a_forgotten_worker_has_no_publisher(publishers):
    publishers.claim("w", Publisher(9))
    publishers.forget("w")
    assert publishers.get("w") is None
    publishers.end("w")
    assert not publishers.is_live("w")
