"""The whole gateway service with a scripted router and worker, and model folders with additional special tokens."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from support.gateway.rest_harness import SAMPLE, Answer, RawClient
from support.gateway.scripted_services import MODEL, Script, ScriptedRouter, ScriptedWorker
from support.processes.ports import free_ports

from baton.gateway.config import GatewayConfig
from baton.gateway.server import serve
from baton.v1 import types_pb2


class Gateway:
    """A running gateway with its scripted router and worker."""

    def __init__(self, worker: ScriptedWorker, router: ScriptedRouter, config: GatewayConfig) -> None:
        self.worker = worker
        self.router = router
        self.config = config
        self.port = int(config.rest_listen.partition(":")[2])
        self.stop = asyncio.Event()
        self.service = asyncio.create_task(serve(config, self.stop))

    async def get(self, path: str) -> Answer:
        async with RawClient.connect(self.port) as client:
            return await client.request("GET", path)

    async def is_ready(self) -> bool:
        with contextlib.suppress(OSError):
            return (await self.get("/ready")).status == 200
        return False

    async def wait_until_ready(self) -> None:
        for _ in range(500):
            if await self.is_ready():
                return
            await asyncio.sleep(0.02)
        raise AssertionError("not ready within 10 s")


@contextlib.asynccontextmanager
async def running(
    script: Script, ready: bool = True, model: Path = SAMPLE, info: types_pb2.ModelInfo = MODEL, **settings: Any
) -> AsyncIterator[Gateway]:
    """Yields a gateway for `model`, whose worker follows the script."""
    rest, rpc = free_ports(2)
    async with ScriptedWorker("w1", script) as worker, ScriptedRouter([worker]) as router:
        router.models = [info] if ready else []
        config = GatewayConfig(
            rest_listen=f"127.0.0.1:{rest}",
            grpc_listen=f"127.0.0.1:{rpc}",
            router=(router.address,),
            model=str(model),
            **{"drain_timeout": 5.0, **settings},
        )
        gateway = Gateway(worker, router, config)
        try:
            if ready:
                await gateway.wait_until_ready()
            yield gateway
        finally:
            gateway.stop.set()
            await gateway.service


def model_folder(folder: Path, template: str, special_tokens: Sequence[str] = (), special: bool = True) -> Path:
    """Writes the sample model's tokenizer with more special tokens, with ids from 4096 on, and another template.

    Omits the sample's own tags, such as <think>. `special` is whether the tokenizer marks the new tokens as special.
    """
    tokenizer = json.loads((SAMPLE / "tokenizer.json").read_text())
    tags = {token["content"] for token in tokenizer["added_tokens"] if not token["special"]}
    vocab = tokenizer["model"]["vocab"].items()
    tokenizer["model"]["vocab"] = {f"unused {i}" if token in tags else token: i for token, i in vocab}
    tokenizer["added_tokens"] = [token for token in tokenizer["added_tokens"] if token["content"] not in tags]
    like = tokenizer["added_tokens"][0]
    for token_id, token in enumerate(special_tokens, MODEL.vocab_size):
        tokenizer["added_tokens"].append({**like, "id": token_id, "content": token, "special": special})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "chat_template.jinja").write_text(template)
    (folder / "tokenizer_config.json").write_text((SAMPLE / "tokenizer_config.json").read_text())
    return folder


def model_info(num_special_tokens: int) -> types_pb2.ModelInfo:
    """Returns the ModelInfo that a worker reports for such a model."""
    info = types_pb2.ModelInfo()
    info.CopyFrom(MODEL)
    info.vocab_size += num_special_tokens
    return info
