"""The soak's verdict on memory."""

import pytest
from chaos.soak import Soaked, rows_of


def soaked(end_bytes, end_pids=(1,)):
    warm = {"gateway-0": ((1,), 100), "decode-1": ((2,), 50)}
    result = Soaked(warm=warm, end={"gateway-0": (end_pids, end_bytes), "decode-1": ((2,), 500)})
    result.counts.update({"right": 9, "left": 1, "asked again": 5})
    return result


def test_growth_is_measured_only_in_undisturbed_services():
    assert soaked(104).growths() == {"gateway-0": pytest.approx(0.04)}
    assert all(row.good for row in rows_of(soaked(104), (), 0))


@pytest.mark.parametrize("bad", ["failed", "wrong"])
def test_a_wrong_answer_is_reported(bad):
    result = soaked(100)
    result.counts[bad] += 1
    first, *others = rows_of(result, (), 0)
    assert not first.good
    assert all(row.good for row in others)
    assert "of 11 requests" in first.what


def test_growth_leaks_and_other_problems_are_reported():
    assert [row.good for row in rows_of(soaked(106), ("x",), 2)] == [True, False, False, False]


def test_memory_is_not_compared_across_a_restart():
    with pytest.raises(AssertionError, match="gateway-0"):
        soaked(100, end_pids=(7,)).growths()
