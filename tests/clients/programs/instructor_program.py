"""What instructor reports of a running server, as one JSON document."""

import json
import sys
from typing import Annotated, Literal

import instructor
from instructor.core import InstructorRetryException
from openai import OpenAI
from pydantic import BaseModel, Field

URL, MODEL, _ = sys.argv[1:]
MESSAGES = [{"role": "user", "content": "Who is in the story? A dog named Tom is four years old."}]


class Hero(BaseModel):
    """The hero of a story."""

    name: Literal["Tom", "Mia"]
    kind: Literal["dog", "girl"]
    age: Annotated[int, Field(ge=1, le=9)]


def extract(mode: instructor.Mode, **fields: object) -> dict[str, object]:
    """One object, validated by instructor at the first try."""
    client = instructor.from_openai(OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0), mode=mode)
    hero, raw = client.create_with_completion(
        model=MODEL, messages=MESSAGES, response_model=Hero, max_retries=1, temperature=0, max_tokens=200, **fields
    )
    return {"hero": hero.model_dump(), "usage": raw.usage.model_dump()}


def partials() -> list[dict[str, object]]:
    """The object as it grows."""
    client = instructor.from_openai(OpenAI(base_url=f"{URL}/v1", api_key="none"), mode=instructor.Mode.JSON_SCHEMA)
    stream = client.create_partial(
        model=MODEL, messages=MESSAGES, response_model=Hero, max_retries=1, temperature=0, max_tokens=200
    )
    return [hero.model_dump() for hero in stream]


def failure() -> str:
    """Returns instructor's error for a wrong model name."""
    client = instructor.from_openai(OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0))
    try:
        client.create(model="no-such-model", messages=MESSAGES, response_model=Hero, max_retries=1)
    except InstructorRetryException as error:
        return str(error)
    return ""


modes = (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA)
found = {
    "modes": {mode.value: extract(mode) for mode in modes},
    "partials": partials(),
    "failure": failure(),
}
print(json.dumps(found))
