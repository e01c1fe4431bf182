import subprocess
import sys
from pathlib import Path

import node
import pytest
from stack import MODEL_NAME

FOLDER = Path(__file__).parent
PROMPT = "Tell me a story about a dog and a river."


@pytest.fixture(scope="module")
def answer(tandem_stack):
    """What every client must get: the model's greedy answer."""
    body = tandem_stack.chat(PROMPT, temperature=0, max_tokens=64)
    text = body["choices"][0]["message"]["content"]
    assert len(text.split()) > 10
    return text


def python(name, *words):
    ended = subprocess.run([sys.executable, FOLDER / name, *words], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_the_python_grpc_client_gets_the_answer(tandem_stack, answer):
    assert python("grpc_chat.py", tandem_stack.config.grpc_listen, PROMPT).strip() == answer.strip()


def test_the_openai_client_gets_the_answer(tandem_stack, answer):
    assert python("openai_chat.py", tandem_stack.url, PROMPT).strip() == answer.strip()


@pytest.mark.timeout(360)
def test_the_node_grpc_client_gets_the_answer(tandem_stack, answer):
    node.install()
    assert node.run("chat.mjs", tandem_stack.config.grpc_listen, PROMPT).strip() == answer.strip()


def test_the_readmes_curl_line_gets_an_answer(tandem_stack):
    readme = (FOLDER.parents[1] / "README.md").read_text()
    (line,) = [line for line in readme.splitlines() if line.startswith("curl ") and "/v1/chat/completions" in line]
    line = line.replace("http://127.0.0.1:8000", tandem_stack.url)
    ended = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert '"content":' in ended.stdout
    assert MODEL_NAME in ended.stdout
    assert ended.stdout.rstrip().endswith("data: [DONE]")
