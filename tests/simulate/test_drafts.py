"""Workers that guess tokens answer sooner, and as soon as others where no guess is right."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.rpc.errors import InvalidRequest
from baton.services.simulate.cell import Cell, run_cell
from baton.services.simulate.cluster.metrics import Summary
from baton.services.simulate.cluster.settings import ClusterSettings

PLAIN = ClusterSettings(roles=("both", "both"))
SPLIT = ClusterSettings(roles=("prefill", "decode"))


def run(cluster: ClusterSettings, seed: int = 0) -> Summary:
    return run_cell(Cell(cluster, "chat", 1.0, 40.0, rate=2.0, seed=seed))


@pytest.mark.parametrize("cluster", [PLAIN, SPLIT], ids=["both", "split"])
def test_right_guesses_shorten_the_time_between_tokens(cluster: ClusterSettings) -> None:
    plain, guessing = run(cluster), run(replace(cluster, drafts=4, acceptance=0.8))
    assert guessing.num_requests == plain.num_requests
    assert guessing.num_unfinished == guessing.num_refused == 0
    # 1 + 0.8 + 0.8^2 + 0.8^3 + 0.8^4 = 3.4 tokens a step, at nearly the time of one. The last step has more at times.
    assert plain.itl_p50 / 3.7 < guessing.itl_p50 < plain.itl_p50 / 2.5


def test_wrong_guesses_cost_next_to_nothing() -> None:
    plain, guessing = run(PLAIN), run(replace(PLAIN, drafts=4, acceptance=0.0))
    assert guessing.itl_p50 < 1.03 * plain.itl_p50
    assert guessing.num_unfinished == 0


def test_equal_seeds_give_equal_runs() -> None:
    cluster = replace(PLAIN, drafts=3, acceptance=0.5)
    # `extra` has the machine's own seconds.
    one, two, other = (replace(run(cluster, seed), extra={}) for seed in (4, 4, 5))
    assert one == two != other


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"drafts": -1}, "drafts is -1"),
        ({"acceptance": 1.5}, "from 0 to 1"),
        ({"drafts": 2, "state_blocks": 3}, "take no guesses"),
    ],
)
def test_wrong_settings_are_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        replace(PLAIN, **changes).validate()  # type: ignore[arg-type]
