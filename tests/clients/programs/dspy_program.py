"""What DSPy reports of a running server, as one JSON document."""

import json
import sys
from typing import Literal

import dspy
from dspy.lm15 import AccessPolicy, ModelSupport, OpenAIChatCompat, ProviderDefinition, register_provider

URL, MODEL, SCRIPTED_URL = sys.argv[1:]
PROMPT = "Tell me a story about a dog and a river."
CITIES: list[str] = []


class Cast(dspy.Signature):
    """Finds the hero of a story."""

    story: str = dspy.InputField()
    hero: Literal["Tom", "Mia"] = dspy.OutputField()
    kind: Literal["dog", "girl"] = dspy.OutputField()


class Weather(dspy.Signature):
    """Finds the weather with tools."""

    question: str = dspy.InputField()
    tools: list[dspy.Tool] = dspy.InputField()
    outputs: dspy.ToolCalls = dspy.OutputField()


def get_weather(city: str) -> str:
    """The weather in a city."""
    CITIES.append(city)
    return f"sunny in {city}"


def register() -> None:
    """Declares the server as DSPy's documentation says, so that DSPy sends schemas and tools."""
    access = AccessPolicy(provider="baton", base_url=f"{URL}/v1")
    definition = ProviderDefinition.chat(access, compat=OpenAIChatCompat.preset("vllm"))
    register_provider(definition, supports=ModelSupport(function_calling=True, response_schema=True))


def model_at(url: str, name: str = f"openai/{MODEL}", **fields: object) -> dspy.LM:
    settings = {"temperature": 0, "max_tokens": 24, "cache": False, "num_retries": 0, **fields}
    return dspy.LM(name, api_base=f"{url}/v1", api_key="none", **settings)


def predicted() -> dict[str, str]:
    """Fields that DSPy validates: the grammar makes the sample model write them."""
    with dspy.context(lm=model_at(URL, f"baton/{MODEL}", max_tokens=200), adapter=dspy.JSONAdapter()):
        answer = dspy.Predict(Cast)(story="A dog named Tom is four years old.")
    return {"hero": answer.hero, "kind": answer.kind}


def with_tool() -> dict[str, object]:
    adapter = dspy.ChatAdapter(use_native_function_calling=True)
    with dspy.context(lm=model_at(SCRIPTED_URL, f"baton/{MODEL}", max_tokens=200), adapter=adapter):
        answer = dspy.Predict(Weather)(question="What is the weather in Paris?", tools=[dspy.Tool(get_weather)])
    results = [call.execute(functions=[dspy.Tool(get_weather)]) for call in answer.outputs.tool_calls]
    return {"cities": CITIES, "results": results}


def failure() -> str:
    try:
        model_at(URL, "openai/no-such-model")(PROMPT)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


register()
model = model_at(URL)
found = {
    "text": model(PROMPT)[0],
    "output_tokens": model.history[-1]["usage"]["completion_tokens"],
    "responses": model_at(URL, model_type="responses")(PROMPT)[0]["text"],
    "predicted": predicted(),
    "tool": with_tool(),
    "failure": failure(),
}
print(json.dumps(found))
