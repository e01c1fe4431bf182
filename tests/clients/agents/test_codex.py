"""Codex CLI in its default configuration, but for the address: over Responses, with all tools that it sends."""

import json

import pytest
from clients import processes
from clients.environments import NodeEnvironment
from clients.scripted_model import calls_tool
from support.processes.stack import MODEL_NAME, metric

ENVIRONMENT = NodeEnvironment("codex", ("@openai/codex@0.169.0",))
CONFIG = """
model = "{model}"
model_provider = "baton"

[model_providers.baton]
name = "Baton"
base_url = "{url}/v1"
env_key = "BATON_API_KEY"
wire_api = "responses"
"""

pytestmark = [pytest.mark.timeout(900), pytest.mark.clients]


@pytest.fixture
def codex(tmp_path):
    """Runs `codex exec` in an empty folder: `codex(url, prompt)` is its events, as it prints them."""

    def run(url, prompt, *flags):
        home, folder = tmp_path / "home", tmp_path / "work"
        (home / ".codex").mkdir(parents=True)
        folder.mkdir()
        (home / ".codex" / "config.toml").write_text(CONFIG.format(model=MODEL_NAME, url=url))
        words = [ENVIRONMENT.program("codex"), "exec", "--json", "--skip-git-repo-check", *flags, prompt]
        environ = processes.client_environ(home, ENVIRONMENT.node().parent, BATON_API_KEY="none")
        return list(map(json.loads, processes.run(words, folder, environ, 600).splitlines()))

    return run


def items(events, kind):
    done = (event["item"] for event in events if event["type"] == "item.completed")
    return [item for item in done if item["type"] == kind]


def test_codex_runs_a_command_and_reports_the_answer(codex, scripted, tmp_path):
    command = "echo kite > proof.txt; cat proof.txt"
    scripted.says = calls_tool("exec_command", {"cmd": command}, "The file is written.")
    events = codex(scripted.url, "Write kite into proof.txt.", "--sandbox", "workspace-write")
    (executed,) = items(events, "command_execution")
    assert (executed["exit_code"], executed["aggregated_output"]) == (0, "kite\n")
    assert (tmp_path / "work" / "proof.txt").read_text() == "kite\n"
    assert items(events, "agent_message")[-1]["text"] == "The file is written."
    assert "kite\n" in scripted.prompts[-1]


def test_codex_works_with_the_sample_model(codex, tandem_stack):
    before = metric(tandem_stack.get("/metrics")[1], "baton_gateway_output_tokens_total")
    events = codex(tandem_stack.url, "Tell me a story about a dog.")
    made = metric(tandem_stack.get("/metrics")[1], "baton_gateway_output_tokens_total") - before
    (completed,) = (event for event in events if event["type"] == "turn.completed")
    assert completed["usage"]["output_tokens"] == made > 0
    assert completed["usage"]["input_tokens"] > 5000
