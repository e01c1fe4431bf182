"""Mistral's own tokenizers: the token ids of mistral-common for texts and chats."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from clients import processes
from clients.environments import PythonEnvironment
from support.models.texts import TEXTS

from baton.gateway.models.served import load_served_model

ENVIRONMENT = PythonEnvironment("mistral-common", ("mistral-common==1.13.1", "sentencepiece==0.2.3"))
# The files of the package, and what a model folder calls them.
NAMES = {
    "mistral_instruct_tokenizer_240216.model.v2": "tokenizer.model.v2",
    "mistral_instruct_tokenizer_240323.model.v3": "tokenizer.model.v3",
    "mistral_instruct_tokenizer_241114.model.v7": "tokenizer.model.v7",
    "tekken_240911.json": "tekken.json",
}
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
WEATHER = {
    "name": "weather",
    "description": "Weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CHATS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "Hello, who are you?"}]},
    {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello!"},
            {"role": "user", "content": "Name 3 colours: 1,2,3\n\n ok"},
        ]
    },
    {
        "messages": [
            {"role": "user", "content": "What's the weather in Paris?"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "abcdefghi", "name": "weather", "content": "20 degrees"},
            {"role": "assistant", "content": "20 degrees."},
            {"role": "user", "content": "Thanks. And Lyon?"},
        ],
        "tools": [{"type": "function", "function": WEATHER}],
    },
]

pytestmark = [pytest.mark.timeout(700), pytest.mark.clients]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    home = tmp_path_factory.mktemp("home")
    program = Path(__file__).parents[1] / "programs" / "mistral_common_program.py"
    words = [ENVIRONMENT.python(), program, json.dumps(list(NAMES)), json.dumps(TEXTS), json.dumps(CHATS)]
    output = processes.run(words, home, processes.client_environ(home), 200)
    read: dict[str, Any] = json.loads(output.splitlines()[-1])
    return read


@pytest.mark.parametrize("name", NAMES)
def test_texts_and_chats_get_the_ids_of_mistral_common(name: str, found: dict[str, Any], tmp_path: Path) -> None:
    theirs = found[name]
    folder = tmp_path / "model"
    folder.mkdir()
    copy = Path(shutil.copy(theirs["path"], folder / NAMES[name]))
    if name.startswith("tekken"):
        # As files since 2025 have them: without them the converter needs mistral-common itself.
        copy.write_text(json.dumps({**json.loads(copy.read_text()), "special_tokens": theirs["special_tokens"]}))
    (folder / "chat_template.jinja").write_text(theirs["template"])
    model = load_served_model(str(folder))
    for text, expected in zip(TEXTS, theirs["texts"], strict=True):
        # Sentencepiece adds a space even to a text that has one; no tokenizer.json of Mistral's does.
        if text and (text[0] != " " or name.startswith("tekken")):
            assert model.tokenizer.encode(text, add_special_tokens=True) == expected, text
    for chat, expected in zip(CHATS, theirs["chats"], strict=True):
        assert asyncio.run(model.encode_chat(chat["messages"], tools=chat.get("tools"))) == expected
