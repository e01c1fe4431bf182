"""What AutoGen reports of a running server, as one JSON document."""

import asyncio
import json
import sys
from typing import Annotated, Literal

from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import ModelInfo, UserMessage
from autogen_ext.models.openai import OpenAIChatCompletionClient
from openai import APIStatusError
from pydantic import BaseModel, Field

URL, MODEL, SCRIPTED_URL = sys.argv[1:]
MESSAGES = [UserMessage(content="Tell me a story about a dog and a river.", source="user")]
CITIES: list[str] = []
# AutoGen asks for it where it does not know the model.
INFO = ModelInfo(vision=False, function_calling=True, json_output=True, family="unknown", structured_output=True)


class Hero(BaseModel):
    """The hero of a story."""

    name: Literal["Tom", "Mia"]
    age: Annotated[int, Field(ge=1, le=9)]


async def get_weather(city: str) -> str:
    """The weather in a city."""
    CITIES.append(city)
    return f"sunny in {city}"


def client_at(url: str, name: str = MODEL, max_tokens: int = 24) -> OpenAIChatCompletionClient:
    return OpenAIChatCompletionClient(
        model=name, base_url=f"{url}/v1", api_key="none", model_info=INFO, temperature=0, max_tokens=max_tokens,
        max_retries=0,
    )  # fmt: skip


async def with_tool() -> dict[str, object]:
    agent = AssistantAgent(
        "weather", client_at(SCRIPTED_URL, max_tokens=200), tools=[get_weather], reflect_on_tool_use=True
    )
    answer = await agent.run(task="What is the weather in Paris?")
    return {
        "cities": CITIES,
        "events": [message.type for message in answer.messages],
        "text": answer.messages[-1].content,
    }


async def failure() -> dict[str, object]:
    try:
        await client_at(URL, "no-such-model").create(MESSAGES)
    except APIStatusError as error:
        return {"status": error.status_code, "code": error.code}
    return {}


async def main() -> None:
    whole = await client_at(URL).create(MESSAGES)
    stream = client_at(URL).create_stream(MESSAGES, include_usage=True)
    pieces = [piece async for piece in stream]
    parsed = await client_at(URL, max_tokens=200).create(MESSAGES, json_output=Hero)
    found = {
        "text": whole.content,
        "finish_reason": whole.finish_reason,
        "output_tokens": whole.usage.completion_tokens,
        "pieces": pieces[:-1],
        "stream_tokens": pieces[-1].usage.completion_tokens,
        "parsed": Hero.model_validate_json(parsed.content).model_dump(),
        "tool": await with_tool(),
        "failure": await failure(),
    }
    print(json.dumps(found))


asyncio.run(main())
