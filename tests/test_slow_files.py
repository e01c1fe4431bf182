"""The list of slow files, and the order that it gives."""

from pathlib import Path

import pytest
from slow_files import SlowFile, in_turns, read_slow_files


def test_the_longest_files_come_first_and_the_rest_stays_in_order():
    one, two, three, four = (Path(name) for name in "abcd")
    paths = [one, two, one, three, four, three]
    assert in_turns(paths, {three: SlowFile(30.0), four: SlowFile(50.0)}) == [4, 3, 5, 0, 1, 2]


def test_files_that_wait_take_a_third_of_the_time():
    paths = [Path(name) for name in "abcdefg"]
    seconds = (10, 40, 20, 15, 25, 30, 12)
    files = {path: SlowFile(taken, path.name in "abc") for path, taken in zip(paths, seconds, strict=True)}
    assert "".join(paths[place].name for place in in_turns(paths, files)) == "bfedgca"


def test_listed_files_exist():
    assert read_slow_files()


def test_a_file_that_was_renamed_is_named(tmp_path):
    (tmp_path / "slow_files.txt").write_text("# words\n12 tests/conftest.py\n 9 tests/gone.py\n")
    with pytest.raises(ValueError, match=r"lists tests/gone\.py, which is not there"):
        read_slow_files(tmp_path / "slow_files.txt")


def test_pytest_collects_in_that_order(request):
    paths = [item.path for item in request.session.items]
    assert in_turns(paths, read_slow_files()) == list(range(len(paths)))
