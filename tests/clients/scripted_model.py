"""A gateway with a scripted model, for output that a small model does not generate, such as tool calls.

The gateway, its template, parsers and wire are the shipped ones; only the router and the worker are scripted.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from support.gateway.scripted_gateway import model_folder, running
from support.gateway.scripted_services import MODEL
from support.gateway.tools_rig import NAME, QWEN

from baton.gateway.models.tokenization.tokenizer import Tokenizer
from baton.v1 import types_pb2, worker_pb2

CONTEXT_TOKENS = 131072
START_SECONDS = 30

Says = Callable[[str], str]  # the answer to a prompt


def calls_tool(name: str, arguments: dict[str, object], text: str) -> Says:
    """Calls a tool that the prompt offers, then answers its result with `text`; other prompts are answered at once."""
    call = f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"

    def says(prompt: str) -> str:
        offered, _, conversation = prompt.partition("<|im_end|>")
        return call if f'"name": "{name}"' in offered and "<|im_start|>tool" not in conversation else text

    return says


@dataclass
class ScriptedModel:
    """The address of the gateway, its model's script, and its prompts."""

    url: str
    tokenizer: Tokenizer
    says: Says = field(default=lambda prompt: "Once upon a time.")
    prompts: list[str] = field(default_factory=list)

    def token_ids(self, submit: worker_pb2.SubmitRequest) -> list[int]:
        prompt = self.tokenizer.decode(list(submit.prompt_token_ids))
        self.prompts.append(prompt)
        return [*self.tokenizer.encode(self.says(prompt), add_special_tokens=False), MODEL.eos_token_ids[0]]


@contextlib.contextmanager
def scripted_model(folder: Path) -> Iterator[ScriptedModel]:
    """Runs the gateway on an event loop in a thread of its own."""
    started: list[ScriptedModel] = []
    ready, stop = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        model = model_folder(folder, QWEN)
        info = types_pb2.ModelInfo()
        info.CopyFrom(MODEL)
        info.max_model_len = CONTEXT_TOKENS
        tokenizer = Tokenizer(model / "tokenizer.json")
        script = lambda submit: started[0].token_ids(submit)  # noqa: E731
        async with running(script, model=model, info=info, served_model_name=(NAME,)) as gateway:
            started.append(ScriptedModel(f"http://127.0.0.1:{gateway.port}", tokenizer))
            ready.set()
            await stop.wait()
        tokenizer.close()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    try:
        assert ready.wait(START_SECONDS), "the scripted gateway does not start"
        yield started[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(START_SECONDS)
        loop.close()
