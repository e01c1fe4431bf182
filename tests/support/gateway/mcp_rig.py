"""Responses with MCP servers through the whole gateway: a real server, OpenAI's client, a scripted engine."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
from support.gateway.scripted_gateway import Gateway, model_folder, model_info, running
from support.gateway.tools_rig import NAME, QWEN
from support.processes.child_environment import child_environment
from support.processes.ports import free_ports

from baton.gateway.models.tokenization.tokenizer import Tokenizer

_PROGRAM = Path(__file__).with_name("mcp_program.py")
_EOS = 4

RAIN = "It rains in Paris."


@contextlib.contextmanager
def mcp_server(transport: str = "streamable-http", path: str = "mcp") -> Iterator[str]:
    """Yields the URL of an MCP server that runs as a process."""
    (port,) = free_ports(1)
    process = subprocess.Popen(
        [sys.executable, str(_PROGRAM), str(port), transport],
        env=child_environment({}),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}/{path}"
    try:
        for _ in range(600):
            with contextlib.suppress(httpx.HTTPError):
                httpx.get(f"http://127.0.0.1:{port}/other", timeout=5)
                break
            assert process.poll() is None, "the MCP server ended"
            time.sleep(0.05)
        yield url
    finally:
        process.kill()
        process.wait()


def call(label: str, name: str, arguments: str = "{}") -> str:
    """Returns what a model writes to call a tool."""
    return f'<tool_call>\n{{"name": "{label}__{name}", "arguments": {arguments}}}\n</tool_call>'


WEATHER = call("weather", "get_weather", '{"city": "Paris"}')
CALLS_THEN_ANSWERS = {"Question": WEATHER, RAIN: "Take an umbrella."}


def tool(url: str, **fields: Any) -> dict[str, Any]:
    """Returns the tool of a request that names the server of `call`, without approval of its calls."""
    return {"type": "mcp", "server_label": "weather", "server_url": url, "require_approval": "never", **fields}


def types_of(items: Iterable[Any]) -> list[str]:
    """Returns the types of output items."""
    return [item.type for item in items]


@dataclass
class McpRig:
    """A gateway, its client, and what the model writes."""

    gateway: Gateway
    client: openai.AsyncOpenAI
    tokenizer: Tokenizer
    says: dict[str, str] = field(default_factory=dict)  # the last whose key the prompt contains

    def script(self, prompt_token_ids: list[int]) -> list[int]:
        prompt = self.tokenizer.decode(prompt_token_ids)
        text = [text for needle, text in self.says.items() if needle in prompt][-1]
        return [*self.tokenizer.encode(text, add_special_tokens=False), _EOS]

    def prompts(self) -> list[str]:
        return [self.tokenizer.decode(submit.prompt_token_ids) for submit in self.gateway.worker.submits]

    async def ask(self, says: dict[str, str], tools: list[dict[str, Any]], **fields: Any) -> Any:
        self.says = says
        return await self.client.responses.create(model=NAME, tools=tools, **{"input": "Question", **fields})

    async def events(self, says: dict[str, str], tools: list[dict[str, Any]], **fields: Any) -> list[Any]:
        return [event async for event in await self.ask(says, tools, stream=True, **fields)]


@contextlib.asynccontextmanager
async def mcp_rig(folder: Path, **settings: Any) -> AsyncIterator[McpRig]:
    """Yields a gateway with these settings."""
    folder = model_folder(folder / "qwen", QWEN)
    tokenizer = Tokenizer(folder / "tokenizer.json")
    made: list[McpRig] = []
    async with running(
        lambda submit: made[0].script(list(submit.prompt_token_ids)),
        model=folder,
        info=model_info(tokenizer.vocab_size - 4096),
        served_model_name=(NAME,),
        **settings,
    ) as gateway:
        url = f"http://127.0.0.1:{gateway.port}/v1"
        plain = openai.DefaultAsyncHttpxClient(verify=False)  # reading the CA certificates would take 30 ms
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, http_client=plain) as client:
            made.append(McpRig(gateway, client, tokenizer))
            yield made[0]
    tokenizer.close()
