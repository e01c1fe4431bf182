"""The order of work at the encoding threads."""

import asyncio
import threading
from pathlib import Path

import pytest

from baton.gateway.models.tokenization.tokenizer import _SHORT, Tokenizer

SAMPLE = Path(__file__).parents[4] / "models" / "storyteller-7m"


@pytest.fixture
def tokenizer():
    tokenizer = Tokenizer(SAMPLE / "tokenizer.json")
    yield tokenizer
    tokenizer.close()


@pytest.mark.parametrize("size", [_SHORT + 1, 0])
async def test_a_text_waits_for_no_flood_of_long_ones(tokenizer, size):
    """Not one of the long ones is done before it, however many there are."""
    gate = threading.Event()
    flood = [asyncio.create_task(tokenizer.run_on_thread(gate.wait, size)) for _ in range(64)]
    try:
        async with asyncio.timeout(60):
            text = "Once upon a time. " * 200
            assert await tokenizer.encode_async(text, add_special_tokens=False)
        assert not any(task.done() for task in flood)
    finally:
        gate.set()
        await asyncio.gather(*flood)


async def test_a_flood_of_texts_holds_back_no_long_one(tokenizer):
    gate = threading.Event()
    flood = [asyncio.create_task(tokenizer.run_on_thread(gate.wait, 5000)) for _ in range(64)]
    try:
        async with asyncio.timeout(60):
            assert await tokenizer.encode_async("dog " * _SHORT, add_special_tokens=False)
        assert not any(task.done() for task in flood)
    finally:
        gate.set()
        await asyncio.gather(*flood)


async def test_the_event_loop_runs_while_texts_are_encoded(tokenizer):
    gate = threading.Event()
    work = asyncio.create_task(tokenizer.run_on_thread(gate.wait, 5000))
    for _ in range(3):
        await asyncio.sleep(0)
    assert not work.done()
    gate.set()
    assert await work
