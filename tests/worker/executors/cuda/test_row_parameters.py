"""Requests' sampling parameters as words for the kernels: read back as the kernels read them."""

from __future__ import annotations

import numpy as np
import pytest

from baton.kernels.sampling import columns
from baton.worker.core import ReasoningLimit, Row, RowInit, SamplingParams
from baton.worker.executors.cuda.sampling.row_parameters import RowLists, column_words, flags_of, row_lists

VOCABULARY = 100


def tokens_of(bitmap: np.ndarray) -> list[int]:
    return [token for token in range(len(bitmap) * 32) if int(bitmap[token // 32]) & 0xFFFFFFFF & 1 << token % 32]


def words_of(sampling: SamplingParams, lists: RowLists, address: int = 0) -> dict[str, int | float]:
    init = RowInit(Row(3), np.arange(7, dtype=np.int32), 5, sampling)
    (words,) = column_words([init], [lists], [address], VOCABULARY)
    names = [name for name in vars(columns) if name.isupper() and not name.startswith("_")]
    places = {name: getattr(columns, name).value for name in names[: names.index("NUM_COLUMNS")]}
    assert sorted(places.values()) == list(range(columns.NUM_COLUMNS))
    numbers = {name: int(words[place]) for name, place in places.items()}
    return numbers | {
        name: float(words[place : place + 1].view(np.float32)[0]) for name, place in places.items() if place < 6
    }


def flags(*bits: str) -> int:
    return sum(getattr(columns, bit).value for bit in bits)


def test_a_request_without_wishes_has_no_lists_and_no_bits():
    lists = row_lists(SamplingParams(temperature=0.7, seed=-1), VOCABULARY)
    words = words_of(SamplingParams(temperature=0.7, seed=-1), lists)
    assert (len(lists.words), words["FLAGS"], words["NUM_LOGPROBS"], words["REASONING_START"]) == (0, 0, -1, -1)
    assert (words["SEED_LOW"], words["SEED_HIGH"]) == (-1, -1)
    assert words["TEMPERATURE"] == pytest.approx(0.7)
    assert (words["TOP_P"], words["REPETITION"], words["NUM_PROMPT"]) == (1.0, 1.0, 5)


def test_every_list_follows_the_previous_one():
    sampling = SamplingParams(
        logit_bias=((4, 1.5), (99, -2.0)),
        allowed_token_ids=(1, 31, 32, 98),
        suppressed_token_ids=(2, 3),
        min_tokens=6,
        forbidden_sequences=((7,), (8, 9, 10)),
        reasoning_limit=ReasoningLimit(12, (20, 21), 19),
        logprobs=2,
        logprob_token_ids=(50, 51, 52),
    )
    lists = row_lists(sampling, VOCABULARY)
    words = words_of(sampling, lists, address=(5 << 32) + 0x9000_0000)
    biased, biases, allowed, suppressed, prefixes, lasts, end, named = np.split(
        lists.words, np.cumsum([2, 2, 4, 4, 4, 2, 2])
    )
    assert (biased.tolist(), biases.view(np.float32).tolist()) == ([4, 99], [1.5, -2.0])
    assert (tokens_of(allowed), tokens_of(suppressed)) == ([1, 31, 32, 98], [2, 3])
    assert (prefixes.reshape(2, 2).tolist(), lasts.tolist()) == ([[-1, -1], [8, 9]], [7, 10])
    assert (end.tolist(), named.tolist()) == ([20, 21], [50, 51, 52])
    assert words["FLAGS"] == flags("SPECIAL", "BIASED", "ALLOWED", "SUPPRESSED", "RULED")
    counts = ("NUM_BIASES", "NUM_SEQUENCES", "SEQUENCE_WIDTH", "NUM_REASONING_END", "NUM_NAMED", "MIN_TOKENS")
    assert [words[name] for name in counts] == [2, 2, 2, 2, 3, 6]
    assert (words["REASONING_TOKENS"], words["REASONING_START"], words["NUM_LOGPROBS"]) == (12, 19, 0)
    assert (words["LISTS_HIGH"], words["LISTS_LOW"] & 0xFFFFFFFF) == (5, 0x9000_0000)


def test_tokens_that_the_vocabulary_does_not_have_are_left_out():
    sampling = SamplingParams(
        logit_bias=((100, 1.0), (-1, 1.0)),
        allowed_token_ids=(100,),
        suppressed_token_ids=(5000,),
        min_tokens=1,
        forbidden_sequences=((1, 100),),
    )
    lists = row_lists(sampling, VOCABULARY)
    assert (len(lists.words), lists.flags, lists.num_biases, lists.num_sequences) == (0, 0, 0, 0)


def test_suppressed_tokens_count_only_where_a_least_length_is_asked_for():
    assert row_lists(SamplingParams(suppressed_token_ids=(2,)), VOCABULARY).flags == 0


@pytest.mark.parametrize(
    ("fields", "bits"),
    [
        ({"repetition_penalty": 1.1}, ("SPECIAL", "PENALIZED")),
        ({"frequency_penalty": -0.5, "temperature": 0.0}, ("SPECIAL", "PENALIZED")),
        ({"presence_penalty": 0.5}, ("SPECIAL", "PENALIZED")),
        ({"top_k": 20}, ("SPECIAL",)),
        ({"top_p": 0.9}, ("SPECIAL",)),
        ({"min_p": 0.1}, ("SPECIAL",)),
        ({"top_k": 20, "top_p": 0.9, "temperature": 0.0}, ()),
        ({"logprobs": 5}, ()),
    ],
)
def test_a_rows_flags_select_its_kernels(fields, bits):
    sampling = SamplingParams(**fields)
    assert flags_of(sampling, row_lists(sampling, VOCABULARY)) == flags(*bits)


@pytest.mark.parametrize(("top_k", "kept"), [(0, 0), (1, 1), (99, 99), (100, 0), (1 << 30, 0)])
def test_a_top_k_of_the_whole_vocabulary_is_off(top_k, kept):
    sampling = SamplingParams(top_k=top_k)
    assert words_of(sampling, row_lists(sampling, VOCABULARY))["TOP_K"] == kept


@pytest.mark.parametrize(("logprobs", "column"), [(None, -1), (0, 0), (5, 5), (500, VOCABULARY)])
def test_as_many_log_probabilities_are_asked_for_as_there_are_tokens(logprobs, column):
    sampling = SamplingParams(logprobs=logprobs)
    assert words_of(sampling, row_lists(sampling, VOCABULARY))["NUM_LOGPROBS"] == column
