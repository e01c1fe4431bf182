"""Tools that are not served are skipped, and listed; a client that insists on one gets an error that names it."""

import pytest
from support.gateway.rest_harness import rest_side, say

FUNCTION = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
HI = [{"role": "user", "content": "Hi"}]
MESSAGE = {"model": "storyteller-7m", "max_tokens": 5, "messages": HI}
HEADER = "x-baton-ignored"


@pytest.mark.parametrize("kind", ["web_search", "custom", "mcp", "code_interpreter", "x" * 100])
async def test_a_chat_continues_without_other_tools(kind):
    async with rest_side(say("ok")) as rest:
        answer = await rest.chat(tools=[{"type": kind, kind: {"name": "x"}}], tool_choice="auto")
        assert answer.status == 200
        assert answer.headers[HEADER] == f"tools[0] ({kind[:64]})"
        answer = await rest.post("/tokenize", {"messages": HI, "tools": [{"type": kind}]})
        assert (answer.status, answer.headers[HEADER]) == (200, f"tools[0] ({kind[:64]})")


@pytest.mark.parametrize("choice", ["required", {"type": "web_search"}, {"type": "custom", "custom": {"name": "x"}}])
async def test_a_chat_that_insists_is_refused(choice):
    async with rest_side(say("ok")) as rest:
        answer = await rest.chat(tools=[{"type": "web_search"}], tool_choice=choice)
        assert answer.status == 400
        assert answer.error["param"].startswith("tool_choice")
        assert answer.error["message"].count("web_search") or isinstance(choice, dict)


SERVER_TOOLS = [
    {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
    {"type": "code_execution_20250522", "name": "code_execution"},
    {"type": "bash_20250124", "name": "bash"},
    {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 5},
    {"type": "mcp_toolset", "mcp_server_name": "x"},
]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize("tool", SERVER_TOOLS)
async def test_a_message_is_served_without_server_tools(path, tool):
    async with rest_side(say("ok")) as rest:
        answer = await rest.post(path, MESSAGE | {"tools": [tool]})
        assert answer.status == 200, answer.body
        assert f"tools[0] ({tool['type']})" in answer.headers[HEADER]
        name = tool.get("name", "x")
        for choice in ({"type": "any"}, {"type": "tool", "name": name}):
            answer = await rest.post(path, MESSAGE | {"tools": [tool], "tool_choice": choice})
            assert answer.status == 400
            assert tool["type"] in answer.error["message"]


async def test_a_message_names_the_tool_that_it_cannot_insist_on():
    custom = {"name": "f", "input_schema": {"type": "object"}}
    async with rest_side(say("ok"), tool_call_parser="hermes") as rest:
        tools = {"tools": [SERVER_TOOLS[0], custom], "tool_choice": {"type": "tool", "name": "web_search"}}
        answer = await rest.post("/v1/messages", MESSAGE | tools)
        assert answer.status == 400
        assert answer.error["message"] == "tool_choice.name: the tool 'web_search' is not supported"
        wrong = {"tools": [SERVER_TOOLS[0], {"name": "f", "input_schema": {"type": "array"}}]}
        answer = await rest.post("/v1/messages", MESSAGE | wrong)
        assert answer.error["message"].startswith("tools.1.input_schema.type")
