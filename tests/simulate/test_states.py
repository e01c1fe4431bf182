"""Models with states find nearly as much of their prompts as models without, in as much memory."""

from __future__ import annotations

import pytest

from baton.rpc.errors import InvalidRequest
from baton.services.simulate.cell import Cell, run_cell
from baton.services.simulate.cluster.device import DeviceModel
from baton.services.simulate.cluster.settings import ClusterSettings

# A quarter of the layers keep their tokens; a state takes 50 blocks of 64 tokens, as Qwen3-Next's does.
DENSE = ClusterSettings(roles=("both",), num_blocks=4_096)
HYBRID = ClusterSettings(
    roles=("both",), num_blocks=4 * 4_096, state_blocks=50, device=DeviceModel(kv_bytes_per_token=32_768)
)


@pytest.mark.parametrize(("workload", "rate"), [("chat", 6.0), ("agents", 3.0)])
def test_conversations_find_their_history_as_without_states(workload: str, rate: float) -> None:
    dense, hybrid = (run_cell(Cell(cluster, workload, 1.0, 60.0, rate=rate)) for cluster in (DENSE, HYBRID))
    assert dense.hit_rate > 0.7
    assert hybrid.hit_rate > dense.hit_rate - 0.03


def test_workers_of_a_model_with_states_have_one_role() -> None:
    with pytest.raises(InvalidRequest, match="every role must be both"):
        ClusterSettings(roles=("prefill", "decode"), state_blocks=3).validate()
