"""Which MCP servers a request may call, and which calls wait for approval: a real server, OpenAI's client."""

import json

import openai
import pytest
from support.gateway.mcp_rig import CALLS_THEN_ANSWERS, RAIN, WEATHER, call, tool, types_of


@pytest.mark.parametrize("approve", [True, False])
async def test_a_call_waits_for_approval(rig, url, approve):
    asked = await rig.ask(CALLS_THEN_ANSWERS, [tool(url, require_approval=None)])
    assert types_of(asked.output) == ["mcp_list_tools", "mcp_approval_request"]
    request = asked.output[1]
    assert (request.name, json.loads(request.arguments), asked.status) == (
        "get_weather",
        {"city": "Paris"},
        "completed",
    )
    decision = {"type": "mcp_approval_response", "approval_request_id": request.id, "approve": approve, "reason": "no"}
    says = {"Question": "?", RAIN: "Take an umbrella.", "did not approve": "As you wish."}
    events = await rig.events(says, [tool(url)], previous_response_id=asked.id, input=[decision])
    output = events[-1].response.output
    if not approve:
        assert types_of(output) == ["message"]
        assert output[0].content[0].text == "As you wish."
        assert "did not approve this call. no" in rig.prompts()[-1]
        return
    assert types_of(output) == ["mcp_call", "message"]
    assert (output[0].approval_request_id, output[0].output) == (request.id, RAIN)
    # Sent again with the whole conversation, it does not run twice.
    items = [{"role": "user", "content": "Question"}, *asked.output, decision, *output]
    items = [item if isinstance(item, dict) else item.model_dump(exclude_none=True) for item in items]
    again = await rig.ask(
        {"And now": "Still rain."}, [tool(url)], input=[*items, {"role": "user", "content": "And now?"}]
    )
    assert types_of(again.output) == ["message"]
    assert rig.prompts()[-1].count(RAIN) == 1


async def test_only_some_tools_need_no_approval(rig, url):
    approval = {"never": {"read_only": True}}
    says = {"Question": call("weather", "read_notes") + WEATHER}
    response = await rig.ask(says, [tool(url, require_approval=approval)])
    assert types_of(response.output) == ["mcp_list_tools", "mcp_call", "mcp_approval_request"]


async def test_the_operators_servers_are_named_by_label(rig):
    says = {"Question": call("own", "get_weather", '{"city": "Paris"}'), RAIN: "Ok."}
    response = await rig.ask(says, [{"type": "mcp", "server_label": "own"}])
    assert types_of(response.output) == ["mcp_list_tools", "mcp_call", "message"]


async def test_secrets_reach_the_server_and_no_answer(rig, url):
    says = {"Question": call("weather", "whoami"), "Bearer s3cret": "Hello."}
    tools = [tool(url, authorization="s3cret", headers={"X-Team": "t3am"})]
    response = await rig.ask(says, tools)
    assert response.output[1].output == "Bearer s3cret"
    shown = response.tools[0].model_dump()
    assert "authorization" not in shown or shown["authorization"] is None
    assert shown["headers"] == {"X-Team": "<redacted>"}


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"server_url": "http://127.0.0.1:1/mcp"}, "tools.0.server_url", "none of the MCP servers"),
        ({"server_url": "ftp://x/mcp"}, "tools.0.server_url", "http or https"),
        ({"server_url": None}, "tools.0.server_label", "own"),
        ({"server_label": "a b"}, "tools.0.server_label", "letters"),
        ({"connector_id": "connector_gmail"}, "tools.0.connector_id", "server_url"),
        ({"headers": {"Host": "x"}}, "tools.0.headers", "Host"),
        ({"require_approval": "sometimes"}, "tools.0.require_approval", "always"),
        ({"allowed_tools": [1]}, "tools.0.allowed_tools", "strings"),
    ],
)
async def test_a_wrong_server_is_refused_by_its_field(rig, url, fields, param, said):
    with pytest.raises(openai.BadRequestError, match=said) as refused:
        await rig.ask({"Question": "x"}, [tool(url, **fields)])
    assert refused.value.param == param
    assert rig.gateway.worker.submits == []
