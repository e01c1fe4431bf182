"""Proposers guess what followed before, within their limits; lengths follow what pays."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from baton.rpc.errors import InvalidRequest, Unsupported
from baton.worker.config import WorkerConfig
from baton.worker.core import Row, RowInit, SamplingParams
from baton.worker.speculation.lengths import DraftLengths, StepTimes
from baton.worker.speculation.ngram import NgramProposer
from baton.worker.speculation.suffix import SuffixProposer
from baton.worker.speculation_settings import SpeculationSettings, parse_speculation


def tokens(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(values, np.int32)


def init(row: int, namespace: bytes = b"a") -> RowInit:
    return RowInit(Row(row), tokens(1), 1, SamplingParams(), namespace=namespace)


def test_ngram_copies_what_followed_the_latest_longest_match() -> None:
    proposer = NgramProposer(longest=3, shortest=2)
    assert proposer.propose(0, tokens(7, 8, 9, 20, 8, 9, 30, 7, 8, 9), 3).tolist() == [20, 8, 9]
    assert proposer.propose(0, tokens(8, 9, 20, 8, 9, 30, 5, 8, 9), 2).tolist() == [30, 5]
    assert proposer.propose(0, tokens(9, 20, 5, 9), 2).tolist() == []
    assert proposer.propose(0, tokens(9), 2).tolist() == []
    assert proposer.propose(0, tokens(5, 5, 5), 4).tolist() == [5, 5, 5, 5]
    assert proposer.propose(0, tokens(1, 2, 1, 2, 1), 5).tolist() == [2, 1, 2, 1, 2]


def naive_ngram(text: list[int], longest: int, shortest: int, most: int) -> list[int]:
    for length in range(min(longest, len(text) - 1), shortest - 1, -1):
        for end in range(len(text) - 1, length - 1, -1):
            if text[end - length : end] == text[-length:]:
                found = list(text)
                for offset in range(most):
                    found.append(found[end + offset])
                return found[len(text) :]
    return []


def test_ngram_equals_a_naive_search() -> None:
    rng = random.Random(0)
    proposer, found = NgramProposer(4, 2), 0
    for _ in range(2000):
        text = [rng.randrange(4) for _ in range(rng.randint(1, 30))]
        expected = naive_ngram(text, 4, 2, 6)
        assert proposer.propose(0, np.array(text, np.int32), 6).tolist() == expected, text
        found += bool(expected)
    assert found > 1000


def test_suffix_copies_from_outputs_of_the_same_namespace() -> None:
    proposer = SuffixProposer(depth=8, max_tokens=64)
    for row, namespace in ((0, b"a"), (1, b"a"), (2, b"b")):
        proposer.admit(init(row, namespace))
    proposer.free(0, tokens(10, 11, 12, 13, 14, 15))
    assert proposer.propose(1, tokens(3, 4, 11, 12, 13), 8).tolist() == [14, 15]
    assert proposer.propose(1, tokens(3, 4, 12, 13), 8).tolist() == []
    assert proposer.propose(2, tokens(3, 4, 11, 12, 13), 8).tolist() == []
    # A longer match in the request itself wins.
    assert proposer.propose(1, tokens(9, 11, 12, 13, 77, 9, 11, 12, 13), 1).tolist() == [77]


def test_suffix_forgets_the_oldest_outputs() -> None:
    proposer = SuffixProposer(depth=8, max_tokens=20)
    for row in range(8):
        proposer.admit(init(row))
        proposer.free(row, tokens(*range(100 * row, 100 * row + 6)))
    assert proposer.propose(9, tokens(3, 100, 101, 102), 4).tolist() == []
    proposer.admit(init(9))
    assert proposer.propose(9, tokens(3, 700, 701, 702), 4).tolist() == [703, 704, 705]
    assert proposer.propose(9, tokens(3, 0, 1, 2), 4).tolist() == []
    assert len(proposer._places) <= 20
    assert len(proposer._keys) <= 20


def test_random_outputs_leave_the_index_consistent() -> None:
    rng = random.Random(1)
    proposer = SuffixProposer(depth=6, max_tokens=50)
    outputs: list[list[int]] = []
    for _ in range(300):
        proposer.admit(init(0))
        outputs.append([rng.randrange(3) for _ in range(rng.randint(1, 20))])
        proposer.free(0, np.array(outputs[-1], np.int32))
        text = np.array([rng.randrange(3) for _ in range(8)], np.int32)
        found = proposer.propose(0, text, 4).tolist()
        joined = [*map(tuple, outputs), tuple(text.tolist())]
        if found:
            assert any(
                list(one[at : at + 2 + len(found)])[2:] == found or one is joined[-1]
                for one in joined
                for at in range(len(one))
                if list(one[at : at + 2]) == text[-2:].tolist()
            ), (text, found)
    assert sum(map(len, proposer._places.values())) == len(proposer._keys)


def test_step_times_are_fitted() -> None:
    times = StepTimes()
    rng = random.Random(2)
    for _ in range(400):
        count = rng.randint(1, 60)
        times.observe(count, 0.01 + 0.0005 * count)
    empty, slope = times.line()
    assert empty == pytest.approx(0.01, rel=0.05)
    assert slope == pytest.approx(0.0005, rel=0.05)


def settled(rate: float, slope: float, num_rows: int, num_steps: int = 300, most: int = 8) -> float:
    """Returns the mean number of drafts of a row after many steps."""
    rng, lengths, rows = random.Random(3), DraftLengths(num_rows), np.arange(num_rows)
    drafted = 0
    for step in range(num_steps):
        chosen = lengths.choose(rows, np.full(num_rows, most))
        accepted = np.array([next((n for n in range(k) if rng.random() > rate), k) for k in chosen.tolist()], np.int64)
        lengths.observe(rows, chosen, accepted)
        lengths.times.observe(num_rows + int(chosen.sum()), 0.01 + slope * (num_rows + int(chosen.sum())))
        drafted += int(chosen.sum()) if step >= num_steps // 2 else 0
    return drafted / num_rows / (num_steps - num_steps // 2)


def test_lengths_follow_acceptance_and_cost() -> None:
    assert settled(rate=0.95, slope=0.0001, num_rows=1) > 6
    assert settled(rate=0.02, slope=0.002, num_rows=1) < 0.5
    # Tokens that cost as much as those of a step without drafts never pay.
    assert settled(rate=0.8, slope=0.01, num_rows=64) < 1
    assert settled(rate=0.8, slope=0.0, num_rows=64) > 5


def test_lengths_differ_between_rows() -> None:
    lengths, rows = DraftLengths(2), np.arange(2)
    for _ in range(50):
        lengths.observe(rows, np.array([4, 4]), np.array([4, 0]))
        lengths.times.observe(10, 0.012)
        lengths.times.observe(2, 0.01)
    good, bad = lengths.choose(rows, np.array([8, 8])).tolist()
    assert good == 8
    assert bad <= 1


def test_settings_have_vllms_keys() -> None:
    assert parse_speculation("") is None
    given = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 6, "prompt_lookup_min": 3}'
    settings = parse_speculation(given)
    assert settings == SpeculationSettings("ngram", 5, 6, 3)
    assert parse_speculation(settings.to_json()) == settings
    assert parse_speculation('{"method": "suffix"}') == SpeculationSettings("suffix")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "is no object"),
        ("{", "is not JSON"),
        ('{"method": "guess"}', "method is 'guess'; give ngram or suffix or draft_model or eagle3"),
        ('{"num_speculative_token": 3}', "did you mean num_speculative_tokens"),
        ('{"num_speculative_tokens": 0}', "allowed are 1 to 64"),
        ('{"num_speculative_tokens": true}', "must be an integer"),
        ('{"method": "ngram", "prompt_lookup_min": 5}', "at most prompt_lookup_max, 4"),
        ('{"method": "ngram", "model": "x"}', "has no model"),
    ],
)
def test_wrong_settings_are_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        parse_speculation(text)
    assert caught.value.field == "speculative_config"


@pytest.mark.parametrize("method", ["mtp", "deepseek_mtp", "qwen3_next_mtp"])
def test_vllms_names_of_mtp_are_one_method(method: str) -> None:
    settings = parse_speculation(json.dumps({"method": method}))
    assert settings is not None
    assert settings.method == "mtp"
    own = parse_speculation(json.dumps({"method": "my_mtp"}), ["my_mtp"])
    assert own is not None
    assert own.method == "my_mtp"


@pytest.mark.parametrize("method", ["eagle", "medusa"])
def test_methods_with_weights_are_refused_by_name(method: str) -> None:
    with pytest.raises(Unsupported, match=f"method '{method}' is not supported") as caught:
        parse_speculation(json.dumps({"method": method, "model": "folder"}))
    assert caught.value.field == "speculative_config"


@pytest.mark.parametrize("method", ["draft_model", "eagle3", "mtp"])
def test_a_gpu_refuses_models_that_guess(method: str) -> None:
    given = json.dumps({"method": method} | ({} if method == "mtp" else {"model": "folder"}))
    with pytest.raises(Unsupported, match=f"method '{method}' needs executor=cpu; give ngram, suffix") as caught:
        WorkerConfig(executor="cuda", model="x", speculative_config=given).validate()
    assert caught.value.field == "speculative_config"
