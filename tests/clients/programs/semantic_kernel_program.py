"""What Semantic Kernel reports of a running server, as one JSON document."""

import asyncio
import json
import sys
from typing import Annotated, Literal

from openai import AsyncOpenAI
from pydantic import BaseModel, Field
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion, OpenAIChatPromptExecutionSettings
from semantic_kernel.contents import ChatHistory
from semantic_kernel.exceptions import ServiceResponseException
from semantic_kernel.functions import kernel_function

URL, MODEL, SCRIPTED_URL = sys.argv[1:]
PROMPT = "Tell me a story about a dog and a river."
CITIES: list[str] = []


class Hero(BaseModel):
    """The hero of a story."""

    name: Literal["Tom", "Mia"]
    age: Annotated[int, Field(ge=1, le=9)]


class Weather:
    """A plugin."""

    @kernel_function(name="get_weather", description="The weather in a city.")
    def get_weather(self, city: str) -> str:
        CITIES.append(city)
        return f"sunny in {city}"


def service(url: str, name: str = MODEL) -> OpenAIChatCompletion:
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    return OpenAIChatCompletion(ai_model_id=name, async_client=client)


def settings(max_tokens: int = 24, **fields: object) -> OpenAIChatPromptExecutionSettings:
    return OpenAIChatPromptExecutionSettings(temperature=0, max_tokens=max_tokens, **fields)


def asked(text: str) -> ChatHistory:
    history = ChatHistory()
    history.add_user_message(text)
    return history


async def with_tool() -> dict[str, object]:
    kernel, chat = Kernel(), service(SCRIPTED_URL)
    kernel.add_plugin(Weather(), plugin_name="weather")
    wanted = settings(200, function_choice_behavior=FunctionChoiceBehavior.Auto())
    answer = await chat.get_chat_message_content(asked("What is the weather in Paris?"), wanted, kernel=kernel)
    return {"cities": CITIES, "text": str(answer)}


async def failure() -> str:
    try:
        await service(URL, "no-such-model").get_chat_message_content(asked(PROMPT), settings())
    except ServiceResponseException as error:
        return str(error)
    return ""


async def main() -> None:
    chat = service(URL)
    whole = await chat.get_chat_message_content(asked(PROMPT), settings())
    pieces = [str(piece) async for piece in chat.get_streaming_chat_message_content(asked(PROMPT), settings())]
    parsed = await chat.get_chat_message_content(asked("Who is in the story?"), settings(200, response_format=Hero))
    found = {
        "text": str(whole),
        "finish_reason": whole.finish_reason.value,
        "output_tokens": whole.metadata["usage"].completion_tokens,
        "pieces": pieces,
        "parsed": Hero.model_validate_json(str(parsed)).model_dump(),
        "tool": await with_tool(),
        "failure": await failure(),
    }
    print(json.dumps(found))


asyncio.run(main())
