"""Chats with tools through the whole gateway, with OpenAI's client and an engine with scripted tokens."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
from support.gateway.scripted_gateway import Gateway, model_info, running

from baton.gateway.models.tokenization.tokenizer import Tokenizer

NAME = "storyteller-7m"
MESSAGES = [{"role": "user", "content": "What is the weather in Paris?"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather somewhere.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    },
    {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}},
]

QWEN = """{%- if tools %}<|im_start|>system
Call tools in <tool_call></tool_call>:{% for tool in tools %} {{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content or "" }}
{%- for call in message.tool_calls or [] -%}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""
PLAIN = "{% for message in messages %}{{ message.content }} {% endfor %}"
HARMONY = PLAIN + "<|start|>assistant{# <|channel|>final<|message|> #}"
MISTRAL = PLAIN + "{# [TOOL_CALLS] [THINK] #}"
HARMONY_TOKENS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|constrain|>", "<|return|>")

THOUGHT = "<think>\nThe user wants the weather, naïve 😀.\n</think>\n\n"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
SECOND_CALL = '\n<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'


@dataclass
class Rig:
    """A gateway, its client, and the worker's next text."""

    gateway: Gateway
    client: openai.AsyncOpenAI
    tokenizer: Tokenizer
    says: str = ""
    eos: int = 4

    @property
    def token_ids(self) -> list[int]:
        return [*self.tokenizer.encode(self.says, add_special_tokens=False), self.eos]

    def prompt(self, number: int = -1) -> str:
        return self.tokenizer.decode(self.gateway.worker.submits[number].prompt_token_ids)

    async def chat(self, says: str, **fields: Any) -> Any:
        self.says = says
        fields = {"model": self.gateway.config.served_model_name[0], "messages": MESSAGES, **fields}
        return await self.client.chat.completions.create(**fields)

    async def chunks(self, says: str, **fields: Any) -> list[Any]:
        return [chunk async for chunk in await self.chat(says, stream=True, **fields)]


@contextlib.asynccontextmanager
async def rig(folder: Path, **settings: Any) -> AsyncIterator[Rig]:
    tokenizer = Tokenizer(folder / "tokenizer.json")
    num_special = tokenizer.vocab_size - 4096
    holder = []
    async with running(
        lambda submit: holder[0].token_ids,
        model=folder,
        info=model_info(num_special),
        served_model_name=(NAME,),
        **settings,
    ) as gateway:
        url = f"http://127.0.0.1:{gateway.port}/v1"
        plain = openai.DefaultAsyncHttpxClient(verify=False)  # reading the CA certificates would take 30 ms
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, http_client=plain) as client:
            holder.append(Rig(gateway, client, tokenizer))
            yield holder[0]
    tokenizer.close()
