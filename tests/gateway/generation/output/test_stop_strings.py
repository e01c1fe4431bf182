"""Stop strings in a stream of pieces."""

import random

import pytest

from baton.gateway.generation.output.stop_strings import StopStrings


def run(pieces, stops, include=False):
    matcher = StopStrings(stops, include_in_output=include)
    out = []
    for piece in pieces:
        text, stop = matcher.push(piece)
        out.append(text)
        if stop is not None:
            return "".join(out), stop
    return "".join([*out, matcher.finish()]), None


def naive(text, stops, include=False):
    """Character by character: the first stop string to be complete, the longest of those."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@pytest.mark.parametrize("include", [False, True])
def test_any_text_in_any_pieces_ends_like_the_naive_search(include):
    rng = random.Random(5)
    for _ in range(5000):
        text = "".join(rng.choice("abc\n") for _ in range(rng.randrange(24)))
        stops = ["".join(rng.choice("abc\n") for _ in range(rng.randint(1, 5))) for _ in range(rng.randint(1, 4))]
        pieces, at = [], 0
        while at < len(text):
            size = rng.randint(0, 4)
            pieces.append(text[at : at + size])
            at += size
        assert run(pieces, stops, include) == naive(text, stops, include), (pieces, stops)


def test_only_possible_stop_strings_are_held_back():
    matcher = StopStrings(["###", "END"])
    assert matcher.push("one #") == ("one ", None)
    assert matcher.push("two EN") == ("#two ", None)
    assert matcher.push("d") == ("ENd", None)
    assert matcher.push("##") == ("", None)
    assert matcher.push("#x") == ("", "###")


def test_special_characters_are_taken_literally():
    assert run(["a]", "^-\\", "b"], ["]^-\\"]) == ("a", "]^-\\")
