import json
import re
import shutil
import subprocess
import sys

import pytest
from support.processes import node
from support.processes.stack import MODEL_NAME, ROOT

EXAMPLES = ROOT / "examples"
PROMPT = "Tell me a story about a dog and a river."
CPP_BUILD = ROOT / "build" / "examples-cpp"


@pytest.fixture(scope="module")
def answer(tandem_stack):
    """What every client must get: the model's greedy answer."""
    body = tandem_stack.chat(PROMPT, temperature=0, max_tokens=64)
    text = body["choices"][0]["message"]["content"]
    assert len(text.split()) > 10
    return text


@pytest.fixture(scope="module")
def javascript():
    node.install()
    return lambda name, *words: node.run(f"{name}.mjs", *words)


@pytest.fixture(scope="module")
def cpp():
    """Runs one of the C++ examples, which it builds where that was not done."""
    if missing := missing_for_cpp():
        pytest.skip(f"the C++ examples cannot be built here: {', '.join(missing)} missing (apt-get install cmake g++ "
                    "libgrpc++-dev libprotobuf-dev pkg-config protobuf-compiler protobuf-compiler-grpc)")  # fmt: skip
    run(500, "cmake", "-S", EXAMPLES / "cpp", "-B", CPP_BUILD)
    run(500, "cmake", "--build", CPP_BUILD, "--parallel", "2")
    return lambda name, *words: run(60, CPP_BUILD / name, *words)


def missing_for_cpp():
    programs = ("cmake", "g++", "pkg-config", "protoc", "grpc_cpp_plugin")
    missing = [name for name in programs if shutil.which(name) is None]
    if "pkg-config" in missing:
        return missing
    return missing + [
        name for name in ("grpc++", "protobuf") if subprocess.run(["pkg-config", "--exists", name]).returncode
    ]


def run(timeout, *words):
    ended = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=timeout)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def python(name, *words):
    return run(60, sys.executable, EXAMPLES / "python" / f"{name}.py", *words)


def test_the_python_grpc_client_gets_the_answer(tandem_stack, answer):
    assert python("grpc_chat", tandem_stack.config.grpc_listen, PROMPT).strip() == answer.strip()


def test_the_openai_client_gets_the_answer(tandem_stack, answer):
    assert python("openai_chat", tandem_stack.url, PROMPT).strip() == answer.strip()


def test_a_program_without_a_server_gets_the_answer(tandem_stack, answer):
    words = (EXAMPLES / "offline" / "answer.py", tandem_stack.config.model, PROMPT)
    assert run(60, sys.executable, *words).strip() == answer.strip()


@pytest.mark.timeout(360)
def test_the_node_clients_get_the_answer(tandem_stack, answer, javascript):
    assert javascript("chat", tandem_stack.config.grpc_listen, PROMPT).strip() == answer.strip()
    assert javascript("openai_chat", tandem_stack.url, PROMPT).strip() == answer.strip()


@pytest.mark.timeout(600)
def test_the_cpp_client_gets_the_answer(tandem_stack, answer, cpp):
    assert cpp("chat", tandem_stack.config.grpc_listen, PROMPT).strip() == answer.strip()


def test_a_structured_output_fits_its_schema_in_python(tandem_stack):
    check_story(python("grpc_structured_output", tandem_stack.config.grpc_listen))


@pytest.mark.timeout(360)
def test_a_structured_output_fits_its_schema_in_node(tandem_stack, javascript):
    check_story(javascript("structured_output", tandem_stack.config.grpc_listen))


@pytest.mark.timeout(600)
def test_a_structured_output_fits_its_schema_in_cpp(tandem_stack, cpp):
    check_story(cpp("structured_output", tandem_stack.config.grpc_listen))


def check_story(printed):
    story = json.loads(printed)
    assert list(story) == ["hero", "age", "friend"]
    assert 1 <= story["age"] <= 99
    assert story["friend"] in ("cat", "dog", "bird")


def test_a_tool_is_called_and_its_result_is_answered_in_python(tandem_stack):
    check_weather(python("grpc_tools", tandem_stack.config.grpc_listen))


@pytest.mark.timeout(360)
def test_a_tool_is_called_and_its_result_is_answered_in_node(tandem_stack, javascript):
    check_weather(javascript("tools", tandem_stack.config.grpc_listen))


@pytest.mark.timeout(600)
def test_a_tool_is_called_and_its_result_is_answered_in_cpp(tandem_stack, cpp):
    check_weather(cpp("tools", tandem_stack.config.grpc_listen))


def check_weather(printed):
    call, _, text = printed.partition("\n")
    arguments, days, city = re.fullmatch(r"get_weather(\{.*\}) = (\d) sunny days in (\w+)", call).groups()
    assert json.loads(arguments) == {"city": city, "days": int(days)}
    assert len(text.split()) > 3


def test_a_response_is_watched_and_continued_in_python(tandem_stack):
    check_conversation(tandem_stack, python("grpc_responses", tandem_stack.config.grpc_listen))


@pytest.mark.timeout(360)
def test_a_response_is_watched_and_continued_in_node(tandem_stack, javascript):
    check_conversation(tandem_stack, javascript("responses", tandem_stack.config.grpc_listen))


@pytest.mark.timeout(600)
def test_a_response_is_watched_and_continued_in_cpp(tandem_stack, cpp):
    check_conversation(tandem_stack, cpp("responses", tandem_stack.config.grpc_listen))


def check_conversation(stack, printed):
    """Checks that REST returns the printed conversation."""
    second = kept(stack, printed.split()[-1])
    first = kept(stack, second["previous_response_id"])
    assert (first["background"], second["background"]) == (True, False)
    first_text, second_text = (response["output"][0]["content"][0]["text"] for response in (first, second))
    assert len(first_text.split()) > 10
    assert printed == f"{first_text}\n{second_text}\n{second['id']}\n"


def kept(stack, response_id):
    status, response = stack.get(f"/v1/responses/{response_id}")
    assert status == 200, response
    return response


def test_the_readmes_curl_line_gets_an_answer(tandem_stack):
    readme = (ROOT / "README.md").read_text()
    (line,) = [line for line in readme.splitlines() if line.startswith("curl ") and "/v1/chat/completions" in line]
    line = line.replace("http://127.0.0.1:8000", tandem_stack.url)
    printed = run(60, "bash", "-c", line)
    assert '"content":' in printed
    assert MODEL_NAME in printed
    assert printed.rstrip().endswith("data: [DONE]")
