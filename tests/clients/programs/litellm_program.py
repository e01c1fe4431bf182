"""What LiteLLM's SDK reports of a running server, as one JSON document."""

import asyncio
import json
import sys
from typing import Annotated, Literal

import litellm
from pydantic import BaseModel, Field

URL, MODEL, _ = sys.argv[1:]
MESSAGES = [{"role": "user", "content": "Tell me a story about a dog and a river."}]
SETTINGS = {"temperature": 0, "max_tokens": 24, "num_retries": 0}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]},
    },
}
PROVIDERS = {
    "openai": {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": "none"},
    "hosted_vllm": {"model": f"hosted_vllm/{MODEL}", "api_base": f"{URL}/v1", "api_key": "none"},
    "anthropic": {"model": f"anthropic/{MODEL}", "api_base": URL, "api_key": "none"},
}


class Hero(BaseModel):
    """The hero of a story."""

    name: Literal["Tom", "Mia"]
    age: Annotated[int, Field(ge=1, le=9)]


def exercise(provider: dict[str, str]) -> dict[str, object]:
    asked = {**provider, "messages": MESSAGES, **SETTINGS}
    whole = litellm.completion(**asked)
    chunks = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
    long = {**asked, "max_tokens": 200}
    called = litellm.completion(**long, tools=[TOOL], tool_choice="required")
    (call,) = called.choices[0].message.tool_calls
    history = [
        *MESSAGES,
        called.choices[0].message.model_dump(),
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    answered = litellm.completion(**{**asked, "messages": history}, tools=[TOOL])
    parsed = litellm.completion(**long, response_format=Hero).choices[0].message.content
    return {
        "text": whole.choices[0].message.content,
        "finish_reason": whole.choices[0].finish_reason,
        "output_tokens": whole.usage.completion_tokens,
        "pieces": [
            chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content
        ],
        "stream_tokens": chunks[-1].usage.completion_tokens,
        "tool": {"name": call.function.name, "arguments": json.loads(call.function.arguments)},
        "after_tool": answered.choices[0].finish_reason,
        "parsed": Hero.model_validate_json(parsed).model_dump(),
        "failure": failure({**provider, "model": provider["model"].replace(MODEL, "no-such-model")}),
    }


def failure(provider: dict[str, str]) -> dict[str, object]:
    try:
        litellm.completion(**provider, messages=MESSAGES, num_retries=0)
    except litellm.NotFoundError as error:
        return {"status": error.status_code, "message": error.message}
    return {}


async def in_event_loop() -> str:
    answer = await litellm.acompletion(**PROVIDERS["openai"], messages=MESSAGES, **SETTINGS)
    return answer.choices[0].message.content


found = {name: exercise(provider) for name, provider in PROVIDERS.items()}
found["async"] = asyncio.run(in_event_loop())
found["responses"] = (
    litellm.responses(**PROVIDERS["openai"], input=MESSAGES[0]["content"], temperature=0, max_output_tokens=24)
    .output[0]
    .content[0]
    .text
)
print(json.dumps(found))
