"""Outputs that repeat themselves: found at the first token that makes it so, whatever else ends or reads the text."""

from hypothesis import given
from hypothesis import strategies as st

from baton.gateway.generation.output.choice import Choice
from baton.gateway.generation.output.repetition import RepetitionDetector, detector_of
from baton.gateway.generation.output.stop_strings import StopStrings
from baton.gateway.models.tokenization.detokenizer import NoText
from baton.v1 import types_pb2


def repeats(tokens, least, most, count):
    """The definition."""
    return any(
        len(tokens) >= size * count and tokens[-size * count :] == tokens[-size:] * count
        for size in range(least, most + 1)
    )


@given(st.lists(st.integers(0, 2), max_size=200), st.integers(1, 4), st.integers(0, 6), st.integers(2, 4), st.data())
def test_the_first_repetition_is_found(tokens, least, more, count, data):
    if data.draw(st.booleans()):
        tokens += data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=8)) * 5
    detector = RepetitionDetector(least, least + more, count)
    for index, token in enumerate(tokens):
        assert detector.add(token) == repeats(tokens[: index + 1], least, least + more, count)


def test_zeros_are_off_and_one():
    assert detector_of(types_pb2.StopConditions()) is None
    wanted = types_pb2.RepetitionDetection(max_pattern_size=2, min_count=3)
    detector = detector_of(types_pb2.StopConditions(repetition_detection=wanted))
    assert [detector.add(token) for token in (4, 4, 4)] == [False, False, True]


class Letters(NoText):
    """Token 0 is a, 1 is b and so on; each text comes with the token after it."""

    def __init__(self):
        self.held = ""

    def push(self, token_ids):
        text = self.held + "".join(chr(97 + token_id) for token_id in token_ids)
        self.held = text[-1:]
        return text[:-1]

    def finish(self):
        return self.held


def make_choice(stops=(), min_tokens=0, count=3):
    return Choice(
        0,
        Letters(),
        StopStrings(stops) if stops else None,
        frozenset(),
        False,
        None,
        repetition=RepetitionDetector(1, 2, count),
        min_tokens=min_tokens,
    )


def test_the_output_ends_with_the_token_that_repeats_and_all_text_is_there():
    choice = make_choice(stops=["bbx"])
    delta = choice.take([0, 2, 1, 1, 1, 3, 3], None)
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("acbbb", "repetition", "repetition_detected")
    assert choice.output_token_ids == delta.token_ids == [0, 2, 1, 1, 1]
    assert choice.finished


def test_it_is_found_across_pieces_and_not_before_min_tokens():
    choice = make_choice(min_tokens=6)
    assert [choice.take([2], None).finish_reason for _ in range(5)] == [None] * 5
    assert choice.take([2], None).finish_reason == "repetition"


def test_a_stop_string_goes_first():
    choice = make_choice(stops=["cc"], count=2)
    delta = choice.take([0, 2, 2], None)
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("a", "stop", "cc")
