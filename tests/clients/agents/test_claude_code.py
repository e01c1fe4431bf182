"""Claude Code in its default configuration, but for the address and the model's name: over Messages."""

import json

import pytest
from clients import processes
from clients.environments import NodeEnvironment
from clients.scripted_model import calls_tool
from support.processes.stack import MODEL_NAME, metric

ENVIRONMENT = NodeEnvironment(
    "claude-code", ("@anthropic-ai/claude-code@2.1.331",), scripts=("@anthropic-ai/claude-code/install.cjs",)
)

pytestmark = [pytest.mark.timeout(900), pytest.mark.clients]


@pytest.fixture
def claude(tmp_path):
    """Runs `claude -p` in an empty folder: `claude(url, prompt)` is the JSON it prints."""

    def run(url, prompt, *flags):
        home, folder = tmp_path / "home", tmp_path / "work"
        home.mkdir()
        folder.mkdir()
        settings = {
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_AUTH_TOKEN": "none",
            "ANTHROPIC_MODEL": MODEL_NAME,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        }
        words = [ENVIRONMENT.program("claude"), "-p", prompt, "--output-format", "json", *flags]
        environ = processes.client_environ(home, ENVIRONMENT.node().parent, **settings)
        # It ends with 1 where it has reached its --max-turns.
        return json.loads(processes.run(words, folder, environ, 600, codes=(0, 1)).splitlines()[-1])

    return run


def test_claude_code_runs_a_command_and_reports_the_answer(claude, scripted, tmp_path):
    arguments = {"command": "echo kite > proof.txt; cat proof.txt", "description": "Writes the file"}
    scripted.says = calls_tool("Bash", arguments, "The file is written.")
    answer = claude(scripted.url, "Write kite into proof.txt.", "--allowedTools", "Bash")
    assert (answer["is_error"], answer["num_turns"], answer["permission_denials"]) == (False, 2, [])
    assert answer["result"] == "The file is written."
    assert (tmp_path / "work" / "proof.txt").read_text() == "kite\n"
    assert "kite" in scripted.prompts[-1].rpartition("<|im_start|>tool")[2]


def test_claude_code_works_with_the_sample_model(claude, tandem_stack):
    """The model may answer or call tools, which are denied: every turn is served, and counted as the gateway counts."""
    before = metric(tandem_stack.get("/metrics")[1], "baton_gateway_output_tokens_total")
    answer = claude(tandem_stack.url, "Tell me a story about a dog.", "--max-turns", "2")
    made = metric(tandem_stack.get("/metrics")[1], "baton_gateway_output_tokens_total") - before
    assert answer["subtype"] in ("success", "error_max_turns")
    assert answer["subtype"] == "error_max_turns" or not answer["is_error"]
    assert answer["usage"]["output_tokens"] == made > 0
    assert answer["usage"]["input_tokens"] + answer["usage"]["cache_read_input_tokens"] > 15000
