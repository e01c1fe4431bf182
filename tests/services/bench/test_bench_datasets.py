"""Prompts of files and traces, arrivals, and what is wrong with them by line."""

from __future__ import annotations

import asyncio
import json
import random
import statistics

import pytest

from baton.services.bench.datasets.choice import check_dataset, make_dataset
from baton.services.bench.datasets.source import BenchFailed
from baton.services.bench.serve.arrivals import Arrivals
from baton.services.bench.serve.options import parser_of


class Words:
    """A vocabulary in which each word is a token, and a template adds three."""

    async def token_pool(self):
        return list(range(10, 1000))

    async def count_tokens(self, text):
        return len(text.split()) + 3


def dataset(*flags, chat=True):
    parser = parser_of("")
    options = parser.parse_args(["--seed", "1", *map(str, flags)])
    check_dataset(options, chat)
    return make_dataset(options, Words(), chat)


def made(source, count):
    async def run():
        await source.prepare()
        return [await source.make() for _ in range(count)]

    return asyncio.run(run())


def conversation(*turns):
    return {"conversations": [{"from": "human", "value": turn} for turn in turns]}


def test_conversations_give_their_first_turn_and_the_length_of_its_answer(tmp_path):
    path = tmp_path / "sharegpt.json"
    usual = [conversation("w " * (5 + n), "v " * (10 + n)) for n in range(4)]
    unusual = [conversation("short", "v " * 10), conversation("w " * 1025, "v " * 10), conversation("alone")]
    path.write_text(json.dumps([*usual, *unusual]))
    found = made(dataset("--dataset-name", "sharegpt", "--dataset-path", path), 8)
    lengths = [(len(one.text.split()), one.num_output) for one in found]
    assert sorted(lengths[:4]) == [(5 + n, 10 + n) for n in range(4)]
    assert lengths[4:] == lengths[:4]
    fixed = made(dataset("--dataset-name", "sharegpt", "--dataset-path", path, "--output-len", 7), 4)
    assert {one.num_output for one in fixed} == {7}
    drawn = made(dataset("--dataset-name", "sharegpt", "--dataset-path", path, "--output-len", "5:500"), 4)
    assert all(5 <= one.num_output <= 500 for one in drawn)
    assert len({one.num_output for one in drawn}) > 1


def test_lines_of_ones_own_keep_their_order(tmp_path):
    path = tmp_path / "custom.jsonl"
    path.write_text('{"prompt": "one", "output_tokens": 3}\n\n{"prompt": "two"}\n')
    found = made(dataset("--dataset-name", "custom", "--dataset-path", path, "--output-len", 9), 3)
    assert [(one.text, one.num_output) for one in found] == [("one", 3), ("two", 9), ("one", 3)]


def test_prefixes_repeat():
    flags = ("--prefix-repetition-prefix-len", 20, "--prefix-repetition-suffix-len", 5)
    source = dataset("--dataset-name", "prefix_repetition", *flags, "--prefix-repetition-num-prefixes", 3, chat=False)
    found = made(source, 40)
    assert {one.num_tokens for one in found} == {25}
    assert len({one.token_ids[:20] for one in found}) == 3
    assert len({one.token_ids for one in found}) == 40


def test_a_trace_gives_its_times_lengths_and_blocks(tmp_path):
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 1000, "input_length": 20, "output_length": 4, "hash_ids": [1, 2]},
        {"timestamp": 1500, "input_length": 18, "output_length": 5, "hash_ids": [1, 3]},
        {"timestamp": 3000, "input_length": 3, "output_length": 6, "hash_ids": []},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    flags = ("--dataset-name", "trace", "--dataset-path", path, "--trace-speed", 2, "--trace-block-size", 16)
    source = dataset(*flags, chat=False)
    assert source.size == 3
    first, second, third, end = made(source, 4)
    assert [one.at for one in (first, second, third)] == [0, 0.25, 1]
    assert [len(one.token_ids) for one in (first, second, third)] == [20, 18, 3]
    assert [one.num_output for one in (first, second, third)] == [4, 5, 6]
    assert first.token_ids[:16] == second.token_ids[:16]
    assert first.token_ids[16:18] != second.token_ids[16:18]
    assert end is None


WRONG = {
    "no file": ("custom", None, r"--dataset-path .*: .*No such file"),
    "no JSON": ("custom", '{"prompt": "a"}\n{', "line 2 is no JSON"),
    "no object": ("custom", "[]", "line 1 is no JSON object"),
    "no prompt": ("custom", '{"text": "a"}', "line 1 needs a text as prompt"),
    "no number": ("custom", '{"prompt": "a", "output_tokens": 0}', "line 1: output_tokens is 0"),
    "empty": ("custom", "", "has no prompts"),
    "no list": ("sharegpt", "{}", "is no list of conversations"),
    "no turns": ("sharegpt", '[{"turns": []}]', "conversation 0 needs conversations"),
    "no usual": ("sharegpt", '[{"conversations": [{"value": "a"}, {"value": "b"}]}]', "no conversation of 4 to 1024"),
    "no time": ("trace", '{"input_length": 1, "output_length": 1}', "line 1: timestamp is None"),
    "no order": (
        "trace",
        '{"timestamp": 5, "input_length": 1, "output_length": 1}\n'
        '{"timestamp": 4, "input_length": 1, "output_length": 1}',
        "line 2 is earlier",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_files_are_named_with_their_line(tmp_path, case):
    name, text, message = WRONG[case]
    path = tmp_path / "prompts"
    if text is not None:
        path.write_text(text)
    with pytest.raises(BenchFailed, match=message):
        made(dataset("--dataset-name", name, "--dataset-path", path, chat=False), 1)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--dataset-name", "sharegpt"), "needs --dataset-path"),
        (("--dataset-path", "x"), "reads no file"),
        (("--dataset-name", "trace", "--dataset-path", "x"), "give --endpoint completions"),
        (("--dataset-name", "custom", "--dataset-path", "x", "--input-len", "5"), "leave it out"),
        (("--prefix-repetition-prefix-len", "0"), "must be at least 1"),
    ],
)
def test_flags_that_do_not_fit_are_refused(flags, message):
    with pytest.raises(ValueError, match=message):
        dataset(*flags)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_rate_and_the_spread_of_their_burstiness(burstiness):
    source = random.Random(1)
    gaps = [Arrivals(burstiness).gap(8.0, 0, None, source) for _ in range(20_000)]
    assert statistics.mean(gaps) == pytest.approx(1 / 8, rel=0.05)
    # The coefficient of variation of a gamma distribution.
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(burstiness**-0.5, rel=0.05)
    assert Arrivals(float("inf")).gap(8.0, 0, None, source) == 1 / 8
    assert Arrivals(burstiness).gap(float("inf"), 0, None, source) == 0


def test_the_rate_rises_during_the_run():
    linear, exponential = Arrivals(1, "linear", 1, 9), Arrivals(1, "exponential", 1, 16)
    assert [linear.rate(5, share) for share in (0, 0.5, 1)] == [1, 5, 9]
    assert [exponential.rate(5, share) for share in (0, 0.5, 1)] == [1, 4, 16]
