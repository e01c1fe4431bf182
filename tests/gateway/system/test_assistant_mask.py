"""The assistant's tokens of a chat: what Transformers says of the same template."""

from __future__ import annotations

import pytest
from support.gateway.rest_harness import SAMPLE, rest_side, say
from transformers import AutoTokenizer

from baton.gateway.models.prompts.assistant_mask import mask_of, split_edges

MARKED = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{%- if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHAT = [
    {"role": "user", "content": "Tell me of a fox."},
    {"role": "assistant", "content": "Once upon a time 🦊 a fox ran home."},
    {"role": "user", "content": "And then?"},
    {"role": "assistant", "content": "é"},
]


async def tokenized(chat, **fields):
    async with rest_side(trust_request_chat_template=True) as rest:
        body = {"messages": chat, "add_generation_prompt": False, "return_assistant_tokens_mask": True, **fields}
        return await rest.post("/tokenize", body)


@pytest.mark.parametrize("size", [1, 60])  # at once; on a thread
@pytest.mark.parametrize("add_generation_prompt", [False, True])
async def test_the_mask_is_that_of_transformers(size, add_generation_prompt):
    chat = [{**message, "content": message["content"] * size} for message in CHAT]
    answer = (await tokenized(chat, chat_template=MARKED, add_generation_prompt=add_generation_prompt)).json
    wanted = AutoTokenizer.from_pretrained(SAMPLE).apply_chat_template(
        chat,
        chat_template=MARKED,
        add_generation_prompt=add_generation_prompt,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    assert answer["tokens"] == wanted["input_ids"]
    assert answer["assistant_tokens_mask"] == wanted["assistant_masks"]
    assert 0 < sum(answer["assistant_tokens_mask"]) < answer["count"]


async def test_a_chat_without_the_assistant_has_no_such_token():
    answer = (await tokenized(CHAT[:1], chat_template=MARKED)).json
    assert answer["assistant_tokens_mask"] == [0] * answer["count"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "it has no {% generation %}"),
        (
            {"chat_template": MARKED, "messages": [{"role": "user", "content": "a <|im_end|> b"}]},
            "contains the text of a control token",
        ),
        ({"messages": None, "prompt": "Hi"}, "only chats have an assistant's tokens"),
    ],
)
async def test_where_there_is_no_mask_the_error_says_why(body, message):
    refused = await tokenized(CHAT, **body)
    assert (refused.status, refused.error["param"]) == (400, "return_assistant_tokens_mask")
    assert message in refused.error["message"]


async def test_without_the_flag_there_is_no_mask():
    assert "assistant_tokens_mask" not in (await tokenized(CHAT, return_assistant_tokens_mask=False)).json


def test_edges_are_cut_out_and_tokens_on_them_count():
    assert split_edges("ab|cd|e||f", "|") == ("abcdef", [(2, 4)])
    assert mask_of([(0, 2), (1, 3), (3, 4), (4, 4), (4, 6)], [(2, 4)]) == [0, 1, 1, 0, 0]


@pytest.mark.parametrize("stream", [False, True])
async def test_chats_mark_the_assistants_tokens_of_their_prompt(stream):
    fields = {"chat_template": MARKED, "add_generation_prompt": False, "return_assistant_tokens_mask": True}
    wanted = (await tokenized(CHAT, chat_template=MARKED)).json
    async with rest_side(say("x"), trust_request_chat_template=True, strict_fields=True) as rest:
        body = {"messages": CHAT, "max_tokens": 1, "stream": stream, **fields}
        answer = await rest.post("/v1/chat/completions", body)
        first, *others = answer.events if stream else [answer.json]
        assert first["assistant_tokens_mask"] == wanted["assistant_tokens_mask"]
        assert not any("assistant_tokens_mask" in one for one in others if isinstance(one, dict))
        shorter = (await rest.post("/v1/chat/completions", {**body, "stream": False, "truncate_prompt_tokens": 5})).json
        assert shorter["assistant_tokens_mask"] == wanted["assistant_tokens_mask"][-5:]
        refused = await rest.post("/v1/chat/completions", {**body, "chat_template": None})
        assert (refused.status, refused.error["param"]) == (400, "return_assistant_tokens_mask")
        plain = (await rest.post("/v1/chat/completions", {"messages": CHAT, "max_tokens": 1})).json
        assert "assistant_tokens_mask" not in plain
