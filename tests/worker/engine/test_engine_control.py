"""Control calls on the engine's side, and their cost on the engine thread."""

from __future__ import annotations

import pytest
from support.engine.engine_harness import make_request, make_rig, prompt_of

from baton.v1 import control_pb2, worker_pb2
from baton.worker.kv.block_pool import PoolAudit
from baton.worker.link.frames import Kind
from baton.worker.link.methods import Method
from baton.worker.process.control import EngineControl
from baton.worker.process.lifecycle import Lifecycle


class Halted:
    """What no test here changes."""


class ControlTarget:
    """An engine that counts how often it is audited."""

    def __init__(self) -> None:
        self.rig = make_rig()
        self.num_audits = 0

    def audit(self) -> PoolAudit:
        self.num_audits += 1
        return self.rig.engine.audit()

    def count_blocks(self) -> PoolAudit:
        return self.rig.engine.count_blocks()

    def num_deferred(self) -> int:
        return self.rig.engine.num_deferred

    def state(self) -> worker_pb2.WorkerState:
        return worker_pb2.WorkerState()

    def counters(self) -> control_pb2.WorkerCounters:
        return control_pb2.WorkerCounters()


@pytest.mark.parametrize("audit", [True, False])
def test_stats_audit_the_pool_only_on_request_and_agree_with_it(audit):
    target = ControlTarget()
    target.rig.run(make_request(prompt_of(30), 4))
    target.rig.submit(make_request(prompt_of(50, 1), 40))
    target.rig.step()
    sent: list[tuple[int, int, bytes]] = []
    control = EngineControl(target, lambda *frame: sent.append(frame), Lifecycle(Halted()))  # type: ignore[arg-type]
    control.call(3, bytes([Method.GET_STATS]) + control_pb2.GetStatsRequest(audit=audit).SerializeToString())
    ((kind, channel, payload),) = sent
    assert (kind, channel) == (Kind.REPLY, 3)
    assert target.num_audits == int(audit)
    stats, books = control_pb2.GetStatsResponse.FromString(payload), target.rig.engine.audit()
    counted = stats.num_held_blocks, stats.num_leased_blocks, stats.num_cached_blocks, stats.num_empty_blocks
    assert counted == (
        books.num_held_blocks,
        books.num_leased_blocks,
        books.num_cached_blocks,
        books.num_empty_blocks,
    )
    assert stats.num_held_blocks > 0
    assert stats.num_cached_blocks > 0
