"""Tools of the Responses API beyond functions: namespaces, custom tools, and those that are skipped. As Codex does."""

import json

import pytest
from support.gateway.responses_rig import both_sides, get
from support.gateway.rest_harness import SAMPLE, rest_side

from baton.gateway.models.served import load_served_model
from baton.gateway.parsing.events import CallArguments, CallEnd, CallStart
from baton.gateway.parsing.format_choice import FormatFlags

PARAMETERS = {"type": "object", "properties": {"target": {"type": "string"}}, "required": ["target"]}
CLOSE = {"type": "function", "name": "close_agent", "description": "Closes.", "strict": False, "parameters": PARAMETERS}
NAMESPACE = {"type": "namespace", "name": "multi_agent_v1", "description": "Of agents.", "tools": [CLOSE]}
MCP = {"type": "namespace", "name": "mcp__idea__", "tools": [CLOSE, {"type": "web_search"}]}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /a+/"},
}
PLAIN = {"type": "function", "name": "exec", "parameters": {"type": "object"}}
SEARCH = {"type": "web_search", "external_web_access": False}
CODEX = [PLAIN, NAMESPACE, SEARCH, PATCH, MCP]
NAMED = {"namespace": "multi_agent_v1", "name": "close_agent"}
HEADER = "x-baton-ignored"


def calling(name, *fragments):
    def script(generation):
        events = [CallStart(0, "call_1", name), *(CallArguments(0, fragment) for fragment in fragments), CallEnd(0)]
        for event in events:
            generation.emit("", events=[event])
        generation.finish(reason="tool_calls")
        generation.done(len(events))

    return script


async def ask(rest, tools, **fields):
    return await rest.post("/v1/responses", {"input": "Hi", "tools": tools, **fields})


def served(script=None):
    return rest_side(script, tool_call_parser="hermes")


@pytest.fixture(autouse=True)
def _hermes(monkeypatch):
    """Gives the sample model a tool format."""

    def load():
        return load_served_model(str(SAMPLE), formats=FormatFlags(tools="hermes"))

    monkeypatch.setattr("support.gateway.rest_harness.sample_model", load)


def seen_tools(monkeypatch, rest):
    """The tools and messages that the template of this side's model is given."""
    (model,) = rest.catalog.models()
    seen = []
    encode = model.encode_chat

    async def encode_chat(messages, **kwargs):
        seen.append((messages, [tool["function"] for tool in kwargs["tools"] or ()]))
        return await encode([{"role": "user", "content": "Hi"}], **{**kwargs, "tools": None})

    monkeypatch.setattr(model, "encode_chat", encode_chat, raising=False)
    return seen


async def test_the_model_is_given_all_that_can_be_served(monkeypatch):
    async with served(calling("exec", "{}")) as rest:
        seen = seen_tools(monkeypatch, rest)
        answer = await ask(rest, CODEX)
        assert answer.status == 200, answer.body
    _, tools = seen[0]
    names = [tool["name"] for tool in tools]
    assert names == ["exec", "multi_agent_v1__close_agent", "apply_patch", "mcp__idea__close_agent"]
    assert tools[1]["parameters"] == PARAMETERS
    assert tools[2]["parameters"]["required"] == ["input"]
    assert answer.headers[HEADER].split(", ") == [
        "tools[1].description",
        "tools[2] (web_search)",
        "tools[3].format",
        "tools[4].tools[1] (web_search)",
    ]
    assert answer.json["tools"] == CODEX


async def test_a_call_in_a_namespace_is_reported_by_both_names():
    async with served(calling("multi_agent_v1__close_agent", '{"target"', ': "a"}')) as rest:
        (item,) = (await ask(rest, CODEX)).json["output"]
    assert (item["type"], item["namespace"], item["name"]) == ("function_call", "multi_agent_v1", "close_agent")
    assert item["arguments"] == '{"target": "a"}'


@pytest.mark.parametrize(
    ("fragments", "text"),
    [
        (('{"input": "*** Begin', ' Patch\\n\\"é\\""}'), '*** Begin Patch\n"é"'),
        (("no JSON",), "no JSON"),
        (("{}",), "{}"),
    ],
)
async def test_a_custom_tools_input_is_a_text(fragments, text):
    async with served(calling("apply_patch", *fragments)) as rest:
        answer = await ask(rest, CODEX, stream=True)
    events = [json.loads(block.partition("data: ")[2]) for block in answer.body.decode().split("\n\n")[:-1]]
    (item,) = events[-1]["response"]["output"]
    assert item["id"].startswith("ctc_")
    assert (item["type"], item["name"], item["call_id"], item["input"]) == (
        "custom_tool_call",
        "apply_patch",
        "call_1",
        text,
    )
    told = [event for event in events if "custom_tool_call_input" in event["type"]]
    assert [(event["type"].rpartition(".")[2], event.get("delta", event.get("input"))) for event in told] == [
        ("delta", text),
        ("done", text),
    ]
    assert not any("function_call_arguments" in event["type"] for event in events)


async def test_history_has_the_names_that_the_model_sees(monkeypatch):
    given = [
        {"role": "user", "content": "Hi"},
        {
            "type": "function_call",
            "call_id": "a",
            "namespace": "multi_agent_v1",
            "name": "close_agent",
            "arguments": "{}",
        },
        {"type": "custom_tool_call", "call_id": "b", "name": "apply_patch", "input": "text"},
        {"type": "function_call_output", "call_id": "a", "output": "closed"},
        {"type": "custom_tool_call_output", "call_id": "b", "output": "done"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
    ]
    async with served(calling("exec", "{}")) as rest:
        seen = seen_tools(monkeypatch, rest)
        answer = await ask(rest, CODEX, input=given)
    assert answer.status == 200, answer.body
    assert "input[5] (web_search_call)" in answer.headers[HEADER]
    chat, _ = seen[0]
    calls = [call["function"] for call in chat[1]["tool_calls"]]
    assert calls == [
        {"name": "multi_agent_v1__close_agent", "arguments": {}},
        {"name": "apply_patch", "arguments": {"input": "text"}},
    ]
    assert [message["content"] for message in chat[2:]] == ["closed", "done"]


@pytest.mark.parametrize(
    ("tools", "choice", "param", "said"),
    [
        ([SEARCH], "required", "tool_choice", "web_search"),
        ([PLAIN, SEARCH], {"type": "web_search"}, "tool_choice.type", "web_search"),
        ([SEARCH], {"type": "web_search"}, "tool_choice", "web_search"),
        ([NAMESPACE], {"type": "function", "name": "close_agent"}, "tool_choice.name", "close_agent"),
        ([PLAIN, PLAIN], None, "tools.1.name", "exec"),
        ([{"type": "namespace", "tools": [CLOSE]}], None, "tools.0.name", "required"),
        (
            [{**NAMESPACE, "tools": [{"type": "function"}]}],
            None,
            "tools.0.tools.0.name",
            "required",
        ),
        ([{"type": "custom"}], None, "tools.0.name", "required"),
        ([{"name": "f"}], None, "tools.0.type", "string"),
    ],
)
async def test_unsupported_tools_are_named(tools, choice, param, said):
    async with served() as rest:
        answer = await ask(rest, tools, **({} if choice is None else {"tool_choice": choice}))
    assert (answer.status, answer.error["param"]) == (400, param)
    assert said in answer.error["message"]


async def test_a_namespaces_function_can_be_chosen():
    choice = {"type": "function", **NAMED}
    async with served(calling("multi_agent_v1__close_agent", "{}")) as rest:
        answer = await ask(rest, CODEX, tool_choice=choice)
    assert answer.status == 200, answer.body
    assert answer.json["output"][0]["namespace"] == "multi_agent_v1"


async def test_grpc_clients_get_calls_by_flat_names():
    async with both_sides(calling("apply_patch", '{"input": "é"}'), tool_call_parser="hermes") as (rest, stub):
        made = (await ask(rest, CODEX)).json
        response = await get(stub, made["id"])
    (item,) = response.output
    assert (item.function_call.name, json.loads(item.function_call.arguments)) == ("apply_patch", {"input": "é"})
