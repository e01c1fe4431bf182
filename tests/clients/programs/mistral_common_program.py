"""What mistral-common makes of texts and chats with each of its tokenizers, as one JSON document."""

import json
import sys
from pathlib import Path

import mistral_common
from mistral_common.integrations.chat_templates.chat_templates import convert_tokenizer_to_chat_template
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
from mistral_common.tokens.tokenizers.tekken import Tekkenizer

NAMES, TEXTS, CHATS = map(json.loads, sys.argv[1:])
DATA = Path(mistral_common.__file__).parent / "data"


def chat_of(tokenizer: MistralTokenizer, chat: dict) -> list[int]:
    messages = [{key: value for key, value in one.items() if value is not None} for one in chat["messages"]]
    request = ChatCompletionRequest.from_openai(messages=messages, tools=chat.get("tools"))
    return tokenizer.encode_chat_completion(request).tokens


found = {}
for name in NAMES:
    tokenizer = MistralTokenizer.from_file(str(DATA / name))
    raw = tokenizer.instruct_tokenizer.tokenizer
    found[name] = {
        "path": str(DATA / name),
        "special_tokens": [
            {**one, "token_str": getattr(one["token_str"], "value", one["token_str"])}
            for one in Tekkenizer.DEPRECATED_SPECIAL_TOKENS
        ],
        "template": convert_tokenizer_to_chat_template(DATA / name),
        "texts": [raw.encode(text, bos=True, eos=False) for text in TEXTS],
        "chats": [chat_of(tokenizer, chat) for chat in CHATS],
    }
print(json.dumps(found))
