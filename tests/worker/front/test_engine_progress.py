"""What a worker's front counts as progress of its engine."""

from __future__ import annotations

from baton.worker.config import WorkerConfig
from baton.worker.front.engine_host import EngineHost
from baton.worker.link.frames import Kind


async def test_messages_of_prefill_workers_are_progress_and_other_frames_are_not() -> None:
    host = EngineHost(WorkerConfig())
    before = host.progress
    for kind in (Kind.GENERATE, Kind.CALL, Kind.PREFILL, Kind.PEER_CLOSE):
        host.send(kind, 1)
    assert host.progress == before
    host.send(Kind.PEER, 1)
    host.send(Kind.PEER, 2)
    assert host.progress == before + 2
