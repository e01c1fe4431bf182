"""The command line tool `llm`: prompts, streams, schemas, conversations, and tools that it runs."""

import json

import pytest
from clients import processes
from clients.conftest import PROMPT
from clients.environments import PythonEnvironment
from clients.scripted_model import calls_tool
from support.processes.stack import MODEL_NAME

ENVIRONMENT = PythonEnvironment("llm", ("llm==0.36",))
SCHEMA = {"type": "object", "properties": {"hero": {"enum": ["Tom", "Mia"]}}, "required": ["hero"]}
FUNCTION = """
def get_weather(city: str) -> str:
    "The weather in a city."
    return f"sunny in {city}"
"""

pytestmark = pytest.mark.timeout(700)


@pytest.fixture
def llm(tandem_stack, scripted, tmp_path):
    """Runs `llm` with both models in its configuration, as its documentation says for compatible servers."""
    models = [
        {
            "model_id": name,
            "model_name": MODEL_NAME,
            "api_base": f"{url}/v1",
            "supports_schema": True,
            "supports_tools": True,
        }
        for name, url in (("storyteller", tandem_stack.url), ("scripted", scripted.url))
    ]
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps(models))
    environ = processes.client_environ(tmp_path, LLM_USER_PATH=str(tmp_path))
    program = ENVIRONMENT.program("llm")
    return lambda *words: processes.run([program, *words], tmp_path, environ, 60)


def test_answers_are_streamed_or_whole_and_logged_with_their_tokens(llm, story, tandem_stack):
    greedy = ("-o", "temperature", "0", "-o", "max_tokens")
    assert llm("-m", "storyteller", *greedy, "24", PROMPT).strip() == story
    assert llm("-m", "storyteller", "--no-stream", *greedy, "24", PROMPT).strip() == story
    # Options do not carry over to a continued conversation: without them the model is sampled, and may end early.
    text = llm("-m", "storyteller", "--continue", *greedy, "8", "And then?").strip()
    *_, second, last = json.loads(llm("logs", "list", "--json"))
    assert second["output_tokens"] == 24
    assert last["conversation_id"] == second["conversation_id"]
    turns = [("user", PROMPT), ("assistant", story), ("user", "And then?")]
    messages = [{"role": role, "content": content} for role, content in turns]
    body = {"model": MODEL_NAME, "messages": messages, "temperature": 0, "max_tokens": 8}
    status, same = tandem_stack.post("/v1/chat/completions", body)
    assert status == 200, same
    assert text == same["choices"][0]["message"]["content"].strip()
    assert last["output_tokens"] == same["usage"]["completion_tokens"]
    assert last["input_tokens"] == same["usage"]["prompt_tokens"] > second["input_tokens"] + 24


def test_answers_keep_to_a_schema(llm):
    text = llm("-m", "storyteller", "--schema", json.dumps(SCHEMA), "-o", "max_tokens", "100", "Who is it?")
    assert json.loads(text) in ({"hero": "Tom"}, {"hero": "Mia"})


def test_a_tool_runs_and_its_result_is_answered(llm, scripted):
    scripted.says = calls_tool("get_weather", {"city": "Paris"}, "It is sunny in Paris.")
    text = llm("-m", "scripted", "--functions", FUNCTION, "What is the weather in Paris?")
    assert text.strip() == "It is sunny in Paris."
    assert "sunny in Paris" in scripted.prompts[-1]
