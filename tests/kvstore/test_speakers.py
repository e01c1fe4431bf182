"""Who speaks for a worker, when several claim it."""

import pytest

from baton.kvstore.index.speakers import Speaker, Speakers


@pytest.fixture
def speakers():
    return Speakers()


def test_the_higher_term_wins_whoever_claims_it(speakers):
    here, there = Speaker(5), Speaker(7, "other")
    assert speakers.claim("w", here)
    assert speakers.is_own("w")
    assert speakers.claim("w", there)
    assert not speakers.claim("w", here)
    assert speakers.get("w") is there
    assert not speakers.is_own("w")


def test_between_equal_terms_the_later_claim_wins(speakers):
    first, second = Speaker(5), Speaker(5)
    speakers.claim("w", first)
    assert speakers.claim("w", second)
    assert speakers.get("w") is second


def test_when_a_speaker_is_gone_any_claim_is_better(speakers):
    speakers.claim("w", Speaker(9, "other"))
    speakers.end("w")
    assert speakers.term("w") == 0
    assert not speakers.is_live("w")
    assert list(speakers.of_replica("other")) == ["w"], "it stays named"
    assert speakers.claim("w", Speaker(1))
    assert speakers.term("w") == 1


def test_a_forgotten_worker_has_no_speaker(speakers):
    speakers.claim("w", Speaker(9))
    speakers.forget("w")
    assert speakers.get("w") is None
    speakers.end("w")
    assert not speakers.is_live("w")
