"""opencode with the provider that its documentation shows for compatible servers: over chat completions."""

import json

import pytest
from clients import processes
from clients.environments import NodeEnvironment
from clients.scripted_model import calls_tool
from support.processes.stack import MODEL_NAME, metric

ENVIRONMENT = NodeEnvironment("opencode", ("opencode-ai@1.18.33",), scripts=("opencode-ai/postinstall.mjs",))

pytestmark = [pytest.mark.timeout(900), pytest.mark.clients]


@pytest.fixture
def opencode(tmp_path):
    """Runs `opencode run` in an empty folder: `opencode(url, prompt)` is its events, as it prints them."""

    def run(url, prompt, **settings):
        home, folder = tmp_path / "home", tmp_path / "work"
        home.mkdir()
        folder.mkdir()
        options = {"baseURL": f"{url}/v1", "apiKey": "none"}
        models = {MODEL_NAME: {"name": "Storyteller"}}
        provider = {"npm": "@ai-sdk/openai-compatible", "name": "Baton", "options": options, "models": models}
        config = {
            "provider": {"baton": provider},
            "model": f"baton/{MODEL_NAME}",
            "autoupdate": False,
            "share": "disabled",
        }
        (folder / "opencode.json").write_text(json.dumps({**config, **settings}))
        words = [ENVIRONMENT.program("opencode"), "run", "--format", "json", prompt]
        environ = processes.client_environ(home, ENVIRONMENT.node().parent)
        return list(map(json.loads, processes.run(words, folder, environ, 600).splitlines()))

    return run


def parts(events, kind):
    return [event["part"] for event in events if event["type"] == kind]


def test_opencode_runs_a_command_and_reports_the_answer(opencode, scripted, tmp_path):
    arguments = {"command": "echo kite > proof.txt; cat proof.txt", "description": "Writes the file"}
    scripted.says = calls_tool("bash", arguments, "The file is written.")
    events = opencode(scripted.url, "Write kite into proof.txt.")
    (used,) = parts(events, "tool_use")
    assert (used["tool"], used["state"]["status"], used["state"]["output"]) == ("bash", "completed", "kite\n")
    assert (tmp_path / "work" / "proof.txt").read_text() == "kite\n"
    assert parts(events, "text")[-1]["text"] == "The file is written."
    assert "kite" in scripted.prompts[-1].rpartition("<|im_start|>tool")[2]


def test_opencode_works_with_the_sample_model(opencode, tandem_stack):
    before = metric(tandem_stack.get("/metrics")[1], "baton_gateway_output_tokens_total")
    # A model of this size must not run commands of its own, and may call tools again and again.
    denied = {"permission": {"bash": "deny", "edit": "deny"}, "agent": {"build": {"steps": 2}}}
    events = opencode(tandem_stack.url, "Tell me a story about a dog.", **denied)
    made = metric(tandem_stack.get("/metrics")[1], "baton_gateway_output_tokens_total") - before
    finish = parts(events, "step_finish")[-1]
    assert not [event for event in events if event["type"] == "error"]
    assert 0 < finish["tokens"]["output"] <= made  # the conversation's title is another request
    assert finish["tokens"]["input"] > 5000
