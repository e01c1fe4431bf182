"""What Outlines reports of a running server, as one JSON document."""

import json
import sys
from enum import Enum
from typing import Annotated, Literal

import openai
import outlines
from pydantic import BaseModel, Field

URL, MODEL, _ = sys.argv[1:]
PROMPT = "Tell me a story about a dog and a river."


class Hero(BaseModel):
    """The hero of a story."""

    name: Literal["Tom", "Mia"]
    age: Annotated[int, Field(ge=1, le=9)]


class Animal(Enum):
    """A choice."""

    CAT = "cat"
    DOG = "dog"


client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
model = outlines.from_openai(client, MODEL)
served = outlines.from_vllm(client, MODEL)
found = {
    "text": model(PROMPT, temperature=0, max_tokens=24),
    "pieces": list(model.stream(PROMPT, temperature=0, max_tokens=24)),
    "parsed": Hero.model_validate_json(model(PROMPT, Hero, temperature=0, max_tokens=200)).model_dump(),
    "vllm": {
        "text": served(PROMPT, temperature=0, max_tokens=24),
        "parsed": Hero.model_validate_json(served(PROMPT, Hero, temperature=0, max_tokens=200)).model_dump(),
        "choice": served(PROMPT, Animal, temperature=0, max_tokens=20),
        "regex": served(PROMPT, outlines.regex(r"[0-9]{4}-[0-9]{2}"), temperature=0, max_tokens=20),
        "grammar": served(PROMPT, outlines.cfg('start: "yes" | "no"'), temperature=0, max_tokens=20),
    },
}
print(json.dumps(found))
