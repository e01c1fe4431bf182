"""What pydantic-ai reports of a running server, as one JSON document."""

import asyncio
import json
import sys
from dataclasses import asdict
from typing import Annotated, Literal

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

URL, MODEL, SCRIPTED_URL = sys.argv[1:]
PROMPT = "Tell me a story about a dog and a river."
SETTINGS = {"temperature": 0, "max_tokens": 24}


class Hero(BaseModel):
    """The hero of a story."""

    name: Literal["Tom", "Mia"]
    age: Annotated[int, Field(ge=1, le=9)]


def model_at(url: str, name: str = MODEL) -> Model:
    return OpenAIChatModel(name, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))


async def streamed(agent: Agent) -> list[str]:
    async with agent.run_stream(PROMPT, model_settings=SETTINGS) as result:
        return [piece async for piece in result.stream_text(delta=True, debounce_by=None)]


async def failure() -> dict[str, object]:
    try:
        await Agent(model_at(URL, "no-such-model")).run(PROMPT)
    except ModelHTTPError as error:
        return {"status": error.status_code, "body": error.body}
    return {}


async def with_tool(model: Model) -> dict[str, object]:
    agent, cities = Agent(model), []

    @agent.tool_plain
    def get_weather(city: str) -> str:
        """The weather in a city."""
        cities.append(city)
        return f"sunny in {city}"

    return {"cities": cities, "text": (await agent.run("What is the weather in Paris?")).output}


async def main() -> None:
    chat = Agent(model_at(URL))
    responses = OpenAIResponsesModel(MODEL, provider=OpenAIProvider(base_url=f"{URL}/v1", api_key="none"))
    messages = AnthropicModel(MODEL, provider=AnthropicProvider(base_url=URL, api_key="none"))
    whole = await chat.run(PROMPT, model_settings=SETTINGS)
    asked = {"temperature": 0, "max_tokens": 200}
    found = {
        "text": whole.output,
        "usage": asdict(whole.usage),
        "pieces": await streamed(chat),
        "responses": (await Agent(responses).run(PROMPT, model_settings=SETTINGS)).output,
        "messages": (await Agent(messages).run(PROMPT, model_settings=SETTINGS)).output,
        "by_tool": (await Agent(model_at(URL), output_type=Hero).run(PROMPT, model_settings=asked)).output.model_dump(),
        "by_schema": (
            await Agent(model_at(URL), output_type=NativeOutput(Hero)).run(PROMPT, model_settings=asked)
        ).output.model_dump(),
        "tool": await with_tool(model_at(SCRIPTED_URL)),
        "failure": await failure(),
    }
    print(json.dumps(found))


asyncio.run(main())
