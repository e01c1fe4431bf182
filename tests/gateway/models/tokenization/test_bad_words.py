"""Texts that may not come, as token sequences; and on a running stack, across a hand-over."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.gateway.rest_harness import SAMPLE

from baton.gateway.models.tokenization.bad_words import MAX_WORDS, forbid_words, sequences_of
from baton.gateway.models.tokenization.tokenizer import Tokenizer
from baton.rpc.errors import InvalidRequest
from baton.v1 import types_pb2

VOCAB_SIZE = 4096
TOKENIZER = Tokenizer(SAMPLE / "tokenizer.json")


def texts_of(*words):
    return [TOKENIZER.decode(each) for each in sequences_of(words, TOKENIZER, VOCAB_SIZE)]


def test_a_word_is_forbidden_at_the_start_and_behind_a_space():
    assert texts_of("dog") == ["dog", " dog"]
    assert texts_of(" dog") == ["dog", " dog"]
    assert texts_of("dog", " dog", "cat") == ["dog", " dog", "cat", " cat"]


@settings(deadline=None)
@given(st.text(st.characters(codec="utf-8"), min_size=1, max_size=12).filter(str.strip))
def test_sequences_spell_the_word(word):
    for text in texts_of(word):
        assert text.removeprefix(" ") == word.lstrip()


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["a", ""], "bad_words.1"),
        (["  "], "bad_words.0"),
        (["dog " * 65], "bad_words.0"),
        (["a"] * (MAX_WORDS + 1), "bad_words"),
    ],
)
async def test_invalid_words_are_refused(words, field):
    with pytest.raises(InvalidRequest) as caught:
        await forbid_words(types_pb2.SamplingParams(bad_words=words), TOKENIZER, VOCAB_SIZE)
    assert caught.value.field == field


async def test_sequences_of_the_clients_own_stay():
    own = types_pb2.TokenSequence(token_ids=[7, 8])
    sampling = types_pb2.SamplingParams(bad_words=["dog"] * 40, forbidden_sequences=[own])
    await forbid_words(sampling, TOKENIZER, VOCAB_SIZE)
    assert not sampling.bad_words
    assert len(sampling.forbidden_sequences) == 3
    assert sampling.forbidden_sequences[0] == own


def story(stack, **fields):
    body = {"prompt": "Once upon a time there was a little girl and a dog who", "max_tokens": 40, "temperature": 0}
    status, answer = stack.post("/v1/completions", body | fields)
    assert status == 200, answer
    return answer["choices"][0]["text"]


def test_a_story_without_its_own_words(tandem_stack):
    free = story(tandem_stack)
    words = [word for word in dict.fromkeys(free.split()) if word.isalpha()][:6]
    assert words
    bent = story(tandem_stack, bad_words=words)
    assert bent != free
    assert not set(words) & set(bent.split()[:-1])
    # The next prompt is long enough that another worker computes it, and draws the first token.
    prompt = "Once upon a time there was a little girl. " * 20 + "She had a"
    first = story(tandem_stack, prompt=prompt, max_tokens=1).strip()
    assert story(tandem_stack, prompt=prompt, max_tokens=1, bad_words=[first]).strip() != first
