"""The list of slow files, and the order that it gives."""

from pathlib import Path

import pytest
from slow_files import longest_first, read_slow_files


def test_the_longest_files_come_first_and_the_rest_stays_in_order():
    one, two, three, four = (Path(name) for name in "abcd")
    paths = [one, two, one, three, four, three]
    assert longest_first(paths, {three: 30.0, four: 50.0}) == [4, 3, 5, 0, 1, 2]


def test_listed_files_exist():
    assert read_slow_files()


def test_a_file_that_was_renamed_is_named(tmp_path):
    (tmp_path / "slow_files.txt").write_text("# words\n12 tests/conftest.py\n 9 tests/gone.py\n")
    with pytest.raises(ValueError, match=r"lists tests/gone\.py, which is not there"):
        read_slow_files(tmp_path / "slow_files.txt")


def test_pytest_collects_in_that_order(request):
    seconds = [read_slow_files().get(item.path, 0.0) for item in request.session.items]
    assert seconds == sorted(seconds, reverse=True)
