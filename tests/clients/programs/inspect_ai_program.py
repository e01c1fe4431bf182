"""What Inspect reports of an evaluation on a running server, as one JSON document."""

import json
import sys
from tempfile import mkdtemp

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, ResponseSchema, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import Tool, tool
from inspect_ai.util import json_schema
from pydantic import BaseModel

URL, MODEL, SCRIPTED_URL = sys.argv[1:]
SAMPLES = [Sample(f"Tell me a story about a {word}.", target="Once") for word in ("dog", "cat", "river")]
CITIES: list[str] = []


class Hero(BaseModel):
    """The hero of a story."""

    is_dog: bool


@tool
def get_weather() -> Tool:
    async def execute(city: str) -> str:
        """The weather in a city.

        Args:
            city: The city's name.
        """
        CITIES.append(city)
        return f"sunny in {city}"

    return execute


def model_of(provider: str, url: str, name: str = MODEL) -> object:
    return get_model(f"{provider}/{name}", base_url=url, api_key="none")


def evaluated(task: Task, model: object, **fields: object) -> dict[str, object]:
    (log,) = eval(
        task, model=model, display="none", log_dir=mkdtemp(), log_format="json", temperature=0, max_retries=0, **fields
    )
    report = {"status": log.status, "error": log.error.message if log.error else ""}
    if log.status == "success":
        report["accuracy"] = log.results.scores[0].metrics["accuracy"].value
        report["texts"] = [sample.output.completion for sample in log.samples]
        report["output_tokens"] = sum(usage.output_tokens for usage in log.stats.model_usage.values())
    return report


stories = Task(dataset=SAMPLES, solver=generate(), scorer=includes())
weather = Task(
    dataset=[Sample("What is the weather in Paris?", target="sunny in Paris")],
    solver=[use_tools(get_weather()), generate()],
    scorer=includes(),
)
schema = GenerateConfig(response_schema=ResponseSchema(name="hero", json_schema=json_schema(Hero)))
shaped = Task(dataset=[Sample("Is it a dog?", target="is_dog")], solver=generate(), scorer=includes(), config=schema)
found = {
    "openai": evaluated(stories, model_of("openai", f"{URL}/v1"), max_tokens=24),
    "openai-api": evaluated(stories, model_of("openai-api/baton", f"{URL}/v1"), max_tokens=24),
    "anthropic": evaluated(stories, model_of("anthropic", URL), max_tokens=24),
    "shaped": evaluated(shaped, model_of("openai-api/baton", f"{URL}/v1"), max_tokens=200),
    "tool": {"run": evaluated(weather, model_of("openai-api/baton", f"{SCRIPTED_URL}/v1")), "cities": CITIES},
    "failure": evaluated(stories, model_of("openai-api/baton", f"{URL}/v1", "no-such-model"), max_tokens=24),
}
print(json.dumps(found))
