"""promptfoo: an evaluation over chat, completions, Responses and Messages, and an answer of a schema."""

import json

import pytest
from clients import processes
from clients.environments import NodeEnvironment
from support.processes.stack import MODEL_NAME

# Of 1.9 GB with everything that is optional, it needs its database here.
ENVIRONMENT = NodeEnvironment(
    "promptfoo", ("promptfoo@0.123.1", "@libsql/linux-x64-gnu@0.5.29"), without=("peer", "optional")
)
SCHEMA = {
    "type": "object",
    "properties": {"hero": {"enum": ["Tom", "Mia"]}},
    "required": ["hero"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "hero", "strict": True, "schema": SCHEMA}}

pytestmark = [pytest.mark.timeout(700), pytest.mark.clients]


@pytest.fixture(scope="module")
def evaluated(tandem_stack, tmp_path_factory):
    """The results by their provider's label."""
    home = tmp_path_factory.mktemp("promptfoo")
    openai = {"apiBaseUrl": f"{tandem_stack.url}/v1", "apiKey": "none", "temperature": 0}
    anthropic = {**openai, "apiBaseUrl": tandem_stack.url}
    providers = {
        "chat": ("openai:chat", {**openai, "max_tokens": 24}),
        "completion": ("openai:completion", {**openai, "max_tokens": 24}),
        "responses": ("openai:responses", {**openai, "max_output_tokens": 24}),
        "messages": ("anthropic:messages", {**anthropic, "max_tokens": 24}),
        "schema": ("openai:chat", {**openai, "max_tokens": 100, "response_format": FORM}),
    }
    config = {
        "prompts": ["Tell me a story about a {{thing}}."],
        "providers": [
            {"id": f"{kind}:{MODEL_NAME}", "label": label, "config": fields}
            for label, (kind, fields) in providers.items()
        ],
        "tests": [{"vars": {"thing": "dog and a river"}}],
    }
    (home / "promptfooconfig.json").write_text(json.dumps(config))
    words = [ENVIRONMENT.program("promptfoo"), "eval", "--no-cache", "--no-progress-bar", "--no-table"]
    words += ["--config", "promptfooconfig.json", "--output", "out.json"]
    quiet = {"PROMPTFOO_DISABLE_TELEMETRY": "1", "PROMPTFOO_DISABLE_UPDATE": "1"}
    processes.run(words, home, processes.client_environ(home, ENVIRONMENT.node().parent, **quiet), 100)
    results = json.loads((home / "out.json").read_text())["results"]["results"]
    return {result["provider"]["label"]: result for result in results}


@pytest.mark.parametrize("label", ["chat", "responses", "messages"])
def test_every_api_gives_the_same_text_and_counts_it(evaluated, story, label):
    assert evaluated[label]["response"]["output"] == story
    assert evaluated[label]["response"]["tokenUsage"]["completion"] == 24


def test_completions_are_counted(evaluated):
    assert evaluated["completion"]["success"]
    assert 0 < evaluated["completion"]["response"]["tokenUsage"]["completion"] <= 24


def test_answers_keep_to_a_schema(evaluated):
    assert evaluated["schema"]["response"]["output"] in ({"hero": "Tom"}, {"hero": "Mia"})
