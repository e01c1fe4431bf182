"""The files of a model folder."""

import json
from pathlib import Path

import huggingface_hub
import pytest

from baton.gateway.models.files import read_model_files
from baton.gateway.models.prompts.chat_template import ChatTemplate
from baton.rpc.errors import InvalidRequest

SAMPLE = Path(__file__).parents[3] / "models" / "storyteller-7m"
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def write_model(folder, **files):
    (folder / "tokenizer.json").write_bytes((SAMPLE / "tokenizer.json").read_bytes())
    for name, content in files.items():
        path = folder / name.replace("__", ".")
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(folder)


def test_templates_are_found_where_folders_keep_them(tmp_path):
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    source = write_model(tmp_path, tokenizer_config__json={"chat_template": named, "bos_token": {"content": "<s>"}})
    files = read_model_files(source)
    assert files.chat_templates == {"default": "D", "tool_use": "T"}
    assert files.special_tokens == {"bos_token": "<s>"}
    template = ChatTemplate(files.chat_templates, files.special_tokens, "test")
    chat = [{"role": "user", "content": "x"}]
    assert (template.render(chat), template.render(chat, tools=TOOLS)) == ("D", "T")
    write_model(tmp_path, chat_template__json={"chat_template": "J"})
    assert read_model_files(source).chat_templates["default"] == "J"
    write_model(tmp_path, chat_template__jinja="F")
    assert read_model_files(source).chat_templates["default"] == "F"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer_config__json": "{"}, r"tokenizer_config\.json is not valid JSON"),
        ({"generation_config__json": "[]"}, r"generation_config\.json must hold a JSON object"),
        (
            {"tokenizer_config__json": {"chat_template": [1]}},
            r"tokenizer_config\.json has a chat_template that is neither",
        ),
    ],
)
def test_a_broken_model_file_is_named(tmp_path, files, message):
    with pytest.raises(InvalidRequest, match=message):
        read_model_files(write_model(tmp_path, **files))


def test_a_missing_tokenizer_and_a_missing_folder_are_named(tmp_path):
    with pytest.raises(InvalidRequest, match=r"tokenizer\.json is missing"):
        read_model_files(str(tmp_path))
    with pytest.raises(InvalidRequest, match="neither a local folder nor a hub id"):
        read_model_files(str(tmp_path / "nothing"))


def test_a_revision_is_of_a_hub_id(tmp_path, monkeypatch):
    folder = write_model(tmp_path)
    asked = []

    def download(source, revision, allow_patterns):
        asked.append((source, revision, "tokenizer.json" in allow_patterns))
        return folder

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert str(read_model_files("some-org/some-model", "v1.0").folder) == folder
    assert asked == [("some-org/some-model", "v1.0", True)]
    with pytest.raises(InvalidRequest, match=r"revision=v1 is of a hub id such as org/name, but model .* is a folder"):
        read_model_files(folder, "v1")


def test_prefixes_of_pylate_are_prompts(tmp_path):
    content = {"prompts": {}, "query_prefix": "[Q] ", "document_prefix": "[D] ", "query_length": 32}
    prompts = read_model_files(write_model(tmp_path, config_sentence_transformers__json=content)).text_prompts
    assert (prompts.by_name, prompts.default) == ({"query": "[Q] ", "document": "[D] "}, "")


def test_prompts_of_sentence_transformers_are_read(tmp_path):
    content = {"prompts": {"query": "Q: ", "document": ""}, "default_prompt_name": "query"}
    prompts = read_model_files(write_model(tmp_path, config_sentence_transformers__json=content)).text_prompts
    assert (prompts.by_name, prompts.default) == (content["prompts"], "Q: ")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"prompts": {"query": 1}}, r"config_sentence_transformers\.json has prompts that are not texts by name"),
        (
            {"query_prefix": 1},
            r"config_sentence_transformers\.json has a query_prefix or a document_prefix that is no text",
        ),
        ({"prompts": ["query: "]}, r"config_sentence_transformers\.json has prompts that are not texts by name"),
        ({"prompts": {"a": "b"}, "default_prompt_name": "c"}, "the default_prompt_name 'c', which is none of its"),
    ],
)
def test_wrong_prompts_are_named(tmp_path, content, message):
    with pytest.raises(InvalidRequest, match=message):
        read_model_files(write_model(tmp_path, config_sentence_transformers__json=content))
