"""Placements of one moment share a record, and none is left out."""

import asyncio
import logging

from support.fleet.kvstore_node import eventually

from baton.router.grpc.placement_log import PlacementLog


async def test_a_placement_alone_has_a_record_with_its_request_id(caplog):
    caplog.set_level(logging.INFO)
    PlacementLog().add("r1", "w1", "")
    await eventually(lambda: caplog.records, "a record")
    assert caplog.records[0].request_id == "r1"
    assert caplog.messages == ["placed on w1, prefill there"]


async def test_many_placements_are_logged_together_and_completely(caplog):
    caplog.set_level(logging.INFO)
    log = PlacementLog()
    for number in range(600):
        log.add(f"r{number}.", "w1", "p1")
    log.flush()
    text = " ".join(caplog.messages)
    assert len(caplog.messages) == 3
    assert all(f"r{number}. on w1, prefill p1" in text for number in range(600))
    log.flush()
    await asyncio.sleep(0.1)
    assert len(caplog.messages) == 3


async def test_nothing_is_collected_without_logging(caplog):
    caplog.set_level(logging.WARNING)
    log = PlacementLog()
    log.add("r1", "w1", "")
    assert log._placed == []
