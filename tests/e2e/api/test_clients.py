"""Unmodified third-party clients with running services: they report the requested results."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field
from support.processes import node
from support.processes.stack import MODEL, MODEL_NAME, metric

PROMPT = "Tell me a story about a dog and a river."
NUM_REQUESTS = 12
NUM_TOKENS = 16
OUTPUT_TOKENS = "baton_gateway_output_tokens_total"


@pytest.fixture(scope="module")
def text(tandem_stack):
    """The model's greedy answer."""
    return tandem_stack.chat(PROMPT, temperature=0, max_tokens=24)["choices"][0]["message"]["content"]


@pytest.fixture(scope="module")
def found(tandem_stack):
    """What the Node client reports."""
    node.install()
    script = (Path(__file__).parent / "openai_client.mjs").read_text()
    return json.loads(node.run("--input-type=module", "--eval", script, tandem_stack.url, MODEL_NAME, timeout=120))


@pytest.mark.timeout(400)
def test_openai_for_node_chats_and_streams(found, text):
    assert found["models"] == [MODEL_NAME]
    assert found["whole"]["choices"][0]["message"]["content"] == text
    assert found["whole"]["usage"]["completion_tokens"] == 24
    assert "".join(found["pieces"]) == found["helper"] == text
    assert len(found["pieces"]) > 10
    assert found["streamUsage"]["completion_tokens"] == 24
    assert [choice["index"] for choice in found["completion"]["choices"]] == [0, 1]


def test_openai_for_node_calls_tools_and_reads_documents(found):
    (call,) = found["call"]["choices"][0]["message"]["tool_calls"]
    (streamed,) = found["streamedCall"]["tool_calls"]
    assert call["function"]["name"] == streamed["function"]["name"] == "get_weather"
    assert call["function"]["arguments"] == streamed["function"]["arguments"]
    assert json.loads(call["function"]["arguments"])["city"] in ("Paris", "Rome")
    assert found["parsed"] == {"city": "Oslo"}


def test_openai_for_node_has_responses_and_errors(found, text):
    assert found["response"]["output_text"] == found["retrieved"] == text
    assert found["response"]["usage"]["output_tokens"] == 24
    assert (found["events"][0], found["events"][-1]) == ("response.created", "response.incomplete")
    assert found["events"].count("response.output_text.delta") > 10
    assert (found["wrongModel"]["kind"], found["wrongModel"]["status"]) == ("NotFoundError", 404)
    assert found["wrongField"] == {"kind": "BadRequestError", "status": 400, "param": "top_p"}


@pytest.fixture(scope="module")
def chain(tandem_stack):
    """Makes LangChain's chat models."""

    def make(**fields):
        settings = {"temperature": 0, "max_tokens": 24, "max_retries": 0, "stream_usage": True, **fields}
        return ChatOpenAI(model=MODEL_NAME, base_url=f"{tandem_stack.url}/v1", api_key="none", **settings)

    return make


def test_langchain_invokes_streams_and_batches(chain, text):
    model = chain()
    answer = model.invoke(PROMPT)
    assert answer.content == text
    assert answer.usage_metadata["output_tokens"] == 24
    assert answer.response_metadata["finish_reason"] == "length"
    first, *others = model.stream(PROMPT)
    assert len(others) > 10
    whole = sum(others, first)
    assert whole.content == text
    assert whole.usage_metadata["total_tokens"] == answer.usage_metadata["total_tokens"]
    answers = model.batch([PROMPT] * 4, config={"max_concurrency": 4})
    assert [one.content for one in answers] == [text] * 4
    assert chain(use_responses_api=True).invoke(PROMPT).text == text


async def test_langchain_streams_in_an_event_loop(chain, text):
    assert "".join([piece.content async for piece in chain().astream(PROMPT)]) == text


@tool
def get_weather(city: Literal["Paris", "Rome"], days: Literal[1, 2, 3]) -> str:
    """The weather of the next days."""
    return f"{days} sunny days in {city}"


def test_langchain_calls_tools_and_answers_their_results(chain):
    model = chain(max_tokens=200)
    question = HumanMessage("What is the weather?")
    called = model.bind_tools([get_weather], tool_choice="get_weather", strict=True).invoke([question])
    (call,) = called.tool_calls
    assert not called.invalid_tool_calls
    result = get_weather.invoke(call)
    assert isinstance(result, ToolMessage)
    assert result.content.endswith(call["args"]["city"])
    answer = model.bind_tools([get_weather], tool_choice="none").invoke([question, called, result])
    assert isinstance(answer, AIMessage)
    assert answer.content
    assert not answer.tool_calls


class Story(BaseModel, extra="forbid"):
    hero: str = Field(max_length=20)
    friend: Literal["cat", "dog"]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_gets_objects_of_a_class(chain, method):
    story = chain(max_tokens=300).with_structured_output(Story, method=method).invoke("Who is in the story?")
    assert isinstance(story, Story)
    assert story.friend in ("cat", "dog")


@pytest.mark.timeout(400)
def test_a_load_generator_reports_no_failure_and_the_tokens_that_were_made(tandem_stack, tmp_path):
    rows = [{"prompt": f"{PROMPT} {index}", "output_tokens_count": NUM_TOKENS} for index in range(NUM_REQUESTS)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    before = tandem_stack.get("/metrics")[1]
    words = [Path(sys.executable).parent / "guidellm", "run", "--disable-console"]
    words += ["--backend", f"kind=openai_http,target={tandem_stack.url},model={MODEL_NAME}"]
    words += ["--tokenizer", f"kind=huggingface_auto,model={MODEL}"]
    words += ["--profile", "kind=concurrent,streams=4", "--constraint", f"kind=max_requests,count={NUM_REQUESTS}"]
    words += ["--data", f"kind=json_file,path={tmp_path / 'prompts.jsonl'}"]
    words += ["--output", f"kind=json,path={tmp_path / 'report.json'}"]
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    ended = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (report,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    totals = report["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"], totals["incomplete"]) == (NUM_REQUESTS, 0, 0)
    requests = report["requests"]["successful"]
    assert [one["output_metrics"]["text_tokens"] for one in requests] == [NUM_TOKENS] * NUM_REQUESTS
    assert all(one["output"] and one["time_to_first_token_ms"] > 0 for one in requests)
    after = tandem_stack.get("/metrics")[1]
    made = metric(after, OUTPUT_TOKENS) - metric(before, OUTPUT_TOKENS)
    assert made == NUM_REQUESTS * NUM_TOKENS
