"""The event loop runs between the prompts of a batch."""

import asyncio

from support.gateway.rest_harness import rest_side


async def test_other_work_runs_between_the_prompts_of_a_batch():
    turns = 0

    async def take_turns():
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async with rest_side() as rest:
        other = asyncio.create_task(take_turns())
        # The last prompt is refused, after the others were encoded.
        answer = await rest.complete(["word"] * 900 + ["hello " * 100_000])
        other.cancel()
    assert answer.status == 400
    assert turns > 900
