"""What the OpenAI Agents SDK reports of a running server, as one JSON document."""

import asyncio
import json
import sys
from typing import Annotated, Literal

from agents import (
    Agent,
    AgentOutputSchema,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)
from openai import APIStatusError, AsyncOpenAI
from pydantic import BaseModel, Field

URL, MODEL, SCRIPTED_URL = sys.argv[1:]
PROMPT = "Tell me a story about a dog and a river."
SETTINGS = ModelSettings(temperature=0, max_tokens=24)
CITIES: list[str] = []


class Hero(BaseModel):
    """The hero of a story."""

    name: Literal["Tom", "Mia"]
    age: Annotated[int, Field(ge=1, le=9)]


@function_tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    CITIES.append(city)
    return f"sunny in {city}"


def chat_model(url: str, name: str = MODEL) -> OpenAIChatCompletionsModel:
    return OpenAIChatCompletionsModel(name, AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0))


def responses_model(url: str, name: str = MODEL) -> OpenAIResponsesModel:
    return OpenAIResponsesModel(name, AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0))


def agent(model: object, **fields: object) -> Agent:
    return Agent(name="Storyteller", model=model, **fields)


async def plain(model: object) -> dict[str, object]:
    result = await Runner.run(agent(model, model_settings=SETTINGS), PROMPT)
    usage = result.context_wrapper.usage
    return {"text": result.final_output, "output_tokens": usage.output_tokens, "requests": usage.requests}


async def streamed(model: object) -> list[str]:
    result = Runner.run_streamed(agent(model, model_settings=SETTINGS), PROMPT)
    deltas = [
        event.data.delta
        async for event in result.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    assert "".join(deltas) == result.final_output
    return deltas


async def parsed(model: object) -> dict[str, object]:
    settings = ModelSettings(temperature=0, max_tokens=200)
    schema = AgentOutputSchema(Hero)
    result = await Runner.run(agent(model, output_type=schema, model_settings=settings), "Who is in the story?")
    return result.final_output.model_dump()


async def with_tool(model: object) -> dict[str, object]:
    CITIES.clear()
    result = await Runner.run(agent(model, tools=[get_weather]), "What is the weather in Paris?")
    return {"cities": list(CITIES), "text": result.final_output}


async def two_turns(model: object) -> list[str]:
    """The prompts' texts that the session keeps after two turns."""
    session = SQLiteSession("two turns")
    for prompt in ("Tell me a story.", "And then?"):
        await Runner.run(agent(model, model_settings=SETTINGS), prompt, session=session)
    return [item["role"] for item in await session.get_items()]


async def failure(model: object) -> dict[str, object]:
    try:
        await Runner.run(agent(model), PROMPT)
    except APIStatusError as error:
        return {"status": error.status_code, "code": error.code}
    return {}


async def main() -> None:
    set_tracing_disabled(True)
    found = {}
    # A response that is cut short is an error to this client, and the sample model's stories may not end.
    for kind, make, text_url in (("chat", chat_model, URL), ("responses", responses_model, SCRIPTED_URL)):
        found[kind] = {
            "plain": await plain(make(text_url)),
            "pieces": await streamed(make(text_url)),
            "parsed": await parsed(make(URL)),
            "tool": await with_tool(make(SCRIPTED_URL)),
            "roles": await two_turns(make(text_url)),
            "failure": await failure(make(URL, "no-such-model")),
        }
    print(json.dumps(found))


asyncio.run(main())
