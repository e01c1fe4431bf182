"""What a worker's front counts as progress of its engine."""

from __future__ import annotations

from baton.worker.config import WorkerConfig
from baton.worker.front.engine_client import EngineClient
from baton.worker.link.frames import Kind


async def test_messages_of_prefill_workers_are_progress_and_other_frames_are_not() -> None:
    engine = EngineClient(WorkerConfig())
    before = engine.progress
    for kind in (Kind.GENERATE, Kind.CALL, Kind.PREFILL, Kind.PEER_CLOSE):
        engine.send(kind, 1)
    assert engine.progress == before
    engine.send(Kind.PEER, 1)
    engine.send(Kind.PEER, 2)
    assert engine.progress == before + 2
