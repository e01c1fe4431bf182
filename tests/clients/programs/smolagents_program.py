"""What smolagents reports of a running server, as one JSON document."""

import json
import sys

from openai import APIStatusError
from smolagents import ChatMessage, OpenAIServerModel, ToolCallingAgent, tool

URL, MODEL, SCRIPTED_URL = sys.argv[1:]
MESSAGES = [ChatMessage(role="user", content=[{"type": "text", "text": "Tell me a story about a dog and a river."}])]
CITIES: list[str] = []


@tool
def get_weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: The city's name.
    """
    CITIES.append(city)
    return f"sunny in {city}"


def model_at(url: str, name: str = MODEL, **fields: object) -> OpenAIServerModel:
    return OpenAIServerModel(model_id=name, api_base=f"{url}/v1", api_key="none", temperature=0, **fields)


def with_tool() -> dict[str, object]:
    """One step of the agent: it calls the tool and has its result."""
    agent = ToolCallingAgent(tools=[get_weather], model=model_at(SCRIPTED_URL), max_steps=1, verbosity_level=0)
    answer = agent.run("What is the weather in Paris?")
    step = agent.memory.steps[1]
    return {"cities": CITIES, "observation": step.observations, "text": str(answer)}


def failure() -> dict[str, object]:
    try:
        model_at(URL, "no-such-model").generate(MESSAGES)
    except APIStatusError as error:
        return {"status": error.status_code, "code": error.code}
    return {}


model = model_at(URL, max_tokens=24)
schema = {"type": "object", "properties": {"hero": {"enum": ["Tom", "Mia"]}}, "required": ["hero"]}
forced = model_at(URL, max_tokens=200).generate(MESSAGES, tools_to_call_from=[get_weather])
whole = model.generate(MESSAGES)
found = {
    "text": whole.content,
    "output_tokens": whole.token_usage.output_tokens,
    "pieces": [delta.content for delta in model.generate_stream(MESSAGES) if delta.content],
    "parsed": json.loads(
        model_at(URL, max_tokens=200)
        .generate(MESSAGES, response_format={"type": "json_schema", "json_schema": {"name": "hero", "schema": schema}})
        .content
    ),
    "forced": {
        "name": forced.tool_calls[0].function.name,
        "arguments": json.loads(forced.tool_calls[0].function.arguments),
    },
    "tool": with_tool(),
    "failure": failure(),
}
print(json.dumps(found))
