import json

import pytest

from baton.rpc.errors import InvalidRequest
from baton.services.simulate.requests.text import Texts
from baton.services.simulate.requests.traces import read_trace

HASH_BYTES = 16


def mooncake(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def row(timestamp, length, hash_ids, output=10):
    return {"timestamp": timestamp, "input_length": length, "output_length": output, "hash_ids": hash_ids}


def test_mooncake_rows_share_prefixes_by_their_hash_ids(tmp_path):
    path = mooncake(tmp_path / "t.jsonl", row(3000, 1500, [1, 2, 3]), row(1000, 1100, [1, 2, 9]))
    first, second = read_trace(path, Texts(64))
    assert [(one.time, one.prompt.num_tokens) for one in (first, second)] == [(0.0, 1100), (2.0, 1500)]
    shared = 1024 // 64 * HASH_BYTES
    assert first.prompt.block_hashes[:shared] == second.prompt.block_hashes[:shared]
    assert first.prompt.block_hashes[shared:][:HASH_BYTES] != second.prompt.block_hashes[shared:][:HASH_BYTES]


def test_a_trace_can_be_played_faster_and_cut(tmp_path):
    path = mooncake(tmp_path / "t.jsonl", *(row(1000 * n, 100, [n]) for n in range(5)))
    arrivals = read_trace(path, Texts(64), speed=2.0, max_requests=3)
    assert [one.time for one in arrivals] == [0.0, 0.5, 1.0]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([row(0, 600, [1])], "line 1: input_length 600 needs 2 hash_ids and has 1"),
        ([row(0, 100, [1]), {"timestamp": 1}], "line 2: KeyError 'input_length'"),
        ([row(0, 0, [])], "line 1: .*at least 1"),
        ([], "has no requests"),
    ],
)
def test_errors_in_a_trace_are_named(tmp_path, rows, message):
    with pytest.raises(InvalidRequest, match=message):
        read_trace(mooncake(tmp_path / "t.jsonl", *rows), Texts(64))


def test_csv_rows_share_their_prefix(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(
        "time,input_length,output_length,prefix_id,prefix_length\n0,200,5,a,128\n1.5,300,6,a,128\n2,64,7,,\n"
    )
    one, two, three = read_trace(path, Texts(64))
    assert one.prompt.block_hashes[:32] == two.prompt.block_hashes[:32]
    assert (one.num_output_tokens, three.time, three.prompt.num_tokens) == (5, 2.0, 64)


def test_a_csv_without_its_columns_is_refused(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("time,length\n0,1\n")
    with pytest.raises(InvalidRequest, match="no column input_length, output_length"):
        read_trace(path, Texts(64))


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_trace(tmp_path / "none.jsonl", Texts(64))
