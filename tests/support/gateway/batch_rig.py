"""A REST side that runs batches with a scripted generator, and what its official client does with them."""

import asyncio
import contextlib
import json

from openai import AsyncOpenAI
from support.gateway.rest_harness import rest_side


def line(custom_id, prompt="Hi", url="/v1/completions", **body):
    request = {"custom_id": custom_id, "method": "POST", "url": url, "body": {"prompt": prompt, **body}}
    return json.dumps(request).encode()


@contextlib.asynccontextmanager
async def running(tmp_path, script=None, generator=None, **settings):
    settings.setdefault("batch_store", str(tmp_path / "store"))
    async with (
        rest_side(script, generator=generator, **settings) as rest,
        AsyncOpenAI(base_url=f"http://127.0.0.1:{rest.port}/v1", api_key="x", max_retries=0) as client,
    ):
        yield rest, client


async def begin(client, lines, endpoint="/v1/completions", window="24h", **more):
    file = await client.files.create(file=("in.jsonl", b"\n".join(lines)), purpose="batch")
    made = await client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window=window, **more)
    assert made.status == "validating"
    return made


async def seen(client, batch, condition, seconds=10):
    """Polls a batch until it fulfils a condition."""
    deadline = asyncio.get_running_loop().time() + seconds
    while True:
        batch = await client.batches.retrieve(batch.id)
        if condition(batch):
            return batch
        assert asyncio.get_running_loop().time() < deadline, batch
        await asyncio.sleep(0.02)


async def ended(client, batch):
    return await seen(client, batch, lambda one: one.status in ("completed", "failed", "expired", "cancelled"))


async def results(client, file_id):
    if file_id is None:
        return []
    return [json.loads(one) for one in (await client.files.content(file_id)).text.splitlines()]
