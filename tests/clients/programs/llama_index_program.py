"""What LlamaIndex reports of a running server, as one JSON document."""

import asyncio
import json
import sys
from typing import Annotated, Literal

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from openai import APIStatusError
from pydantic import BaseModel, Field

URL, MODEL, SCRIPTED_URL = sys.argv[1:]
PROMPT = "Tell me a story about a dog and a river."
CITIES: list[str] = []


class Hero(BaseModel):
    """The hero of a story."""

    name: Literal["Tom", "Mia"]
    age: Annotated[int, Field(ge=1, le=9)]


def get_weather(city: str) -> str:
    """The weather in a city."""
    CITIES.append(city)
    return f"sunny in {city}"


def model_at(url: str, name: str = MODEL, max_tokens: int = 24) -> OpenAILike:
    return OpenAILike(
        model=name, api_base=f"{url}/v1", api_key="none", is_chat_model=True, is_function_calling_model=True,
        context_window=2048, temperature=0, max_tokens=max_tokens, max_retries=0,
    )  # fmt: skip


async def with_tool() -> dict[str, object]:
    agent = FunctionAgent(tools=[FunctionTool.from_defaults(get_weather)], llm=model_at(SCRIPTED_URL, max_tokens=200))
    answer = await agent.run("What is the weather in Paris?")
    return {"cities": CITIES, "text": str(answer)}


def failure() -> dict[str, object]:
    try:
        model_at(URL, "no-such-model").chat([ChatMessage(PROMPT)])
    except APIStatusError as error:
        return {"status": error.status_code, "code": error.code}
    return {}


model = model_at(URL)
whole = model.chat([ChatMessage(PROMPT)])
structured = model_at(URL, max_tokens=200).as_structured_llm(Hero)
found = {
    "text": whole.message.content,
    "output_tokens": whole.raw.usage.completion_tokens,
    "pieces": [piece.delta for piece in model.stream_chat([ChatMessage(PROMPT)])],
    "completed": model.complete(PROMPT).text,
    "parsed": structured.chat([ChatMessage("Who is in the story?")]).raw.model_dump(),
    "tool": asyncio.run(with_tool()),
    "failure": failure(),
}
print(json.dumps(found))
