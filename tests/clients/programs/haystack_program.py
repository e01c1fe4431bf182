"""What Haystack reports of a running server, as one JSON document."""

import json
import sys

from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import tool
from haystack.utils import Secret
from openai import APIStatusError

URL, MODEL, SCRIPTED_URL = sys.argv[1:]
MESSAGES = [ChatMessage.from_user("Tell me a story about a dog and a river.")]
CITIES: list[str] = []
SCHEMA = {
    "type": "object",
    "properties": {"hero": {"enum": ["Tom", "Mia"]}},
    "required": ["hero"],
    "additionalProperties": False,
}


@tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    CITIES.append(city)
    return f"sunny in {city}"


def generator(url: str, name: str = MODEL, kind: type = OpenAIChatGenerator, **fields: object) -> object:
    limit = "max_output_tokens" if kind is OpenAIResponsesChatGenerator else "max_completion_tokens"
    settings = {"temperature": 0, limit: 24, **fields.pop("generation_kwargs", {})}
    return kind(
        api_key=Secret.from_token("none"), model=name, api_base_url=f"{url}/v1", max_retries=0,
        generation_kwargs=settings, **fields,
    )  # fmt: skip


def with_tool() -> dict[str, object]:
    long = {"max_completion_tokens": 200}
    agent = Agent(chat_generator=generator(SCRIPTED_URL, generation_kwargs=long), tools=[get_weather])
    answer = agent.run(messages=[ChatMessage.from_user("What is the weather in Paris?")])
    return {"cities": CITIES, "text": answer["last_message"].text}


def failure() -> dict[str, object]:
    try:
        generator(URL, "no-such-model").run(MESSAGES)
    except APIStatusError as error:
        return {"status": error.status_code, "code": error.code}
    return {}


pieces: list[str] = []
whole = generator(URL).run(MESSAGES)["replies"][0]
generator(URL, streaming_callback=lambda chunk: pieces.append(chunk.content)).run(MESSAGES)
wanted = {"type": "json_schema", "json_schema": {"name": "hero", "strict": True, "schema": SCHEMA}}
parsed = generator(URL, generation_kwargs={"response_format": wanted, "max_completion_tokens": 200}).run(MESSAGES)
found = {
    "text": whole.text,
    "finish_reason": whole.meta["finish_reason"],
    "output_tokens": whole.meta["usage"]["completion_tokens"],
    "pieces": pieces,
    "responses": generator(URL, kind=OpenAIResponsesChatGenerator).run(MESSAGES)["replies"][0].text,
    "parsed": json.loads(parsed["replies"][0].text),
    "tool": with_tool(),
    "failure": failure(),
}
print(json.dumps(found))
