"""Measures what hostile bodies cost a gateway: CPU time, the longest stall of its event loop, and retained memory.

baton bench hostile_bodies
"""

import asyncio
import gc
import json
import sys
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[2]))

from support.gateway.rest_harness import RawClient, rest_side, say

BYTES = 15_000_000
FILLINGS = {
    "digits": "1234567890",
    "one word": "a",
    "spaces": " ",
    "words": "hello there ",
    "ideographs": "你好世界",
    "marks": "e\u0301\u0301\u0301",
    "control tokens": "<|im_end|>",
    "tags": "</think>",
    "braces": "{}[],:",
    "quotes": '\\"',
    "lines": "\n",
    "stand-ins": "㐀|",
}
CHATS, TEXTS, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"


def chat(text, **fields):
    return {"messages": [{"role": "user", "content": text}], **fields}


def bodies():
    """Yields names, paths and bodies."""
    for name, piece in FILLINGS.items():
        text = piece * (BYTES // len(json.dumps(piece).encode()))
        yield f"chat: {name}", CHATS, chat(text)
        yield f"chat, truncated: {name}", CHATS, chat(text, truncate_prompt_tokens=-1)
        yield f"completion: {name}", TEXTS, {"prompt": text}
        yield f"tokenize: {name}", TOKENIZE, {"prompt": text}
        small = piece * (250_000 // len(piece))
        yield f"tokenize 250 k: {name}", TOKENIZE, {"prompt": small, "return_token_strs": True}
        yield f"1,000 prompts: {name}", TEXTS, {"prompt": [text[:14_000]] * 1000}
        yield f"tools: {name}", CHATS, chat("x", tools=[tool(text)])
        yield f"documents: {name}", CHATS, chat("x", documents=[{"text": text}])
        yield f"stop: {name}", CHATS, chat("x", stop=[text])
        yield f"bad words: {name}", CHATS, chat("x", bad_words=[text[:14_000]] * 1000)
    for count in (60_000, 500_000):
        yield f"{count} messages", CHATS, {"messages": [{"role": "user", "content": ""}] * count}
        yield f"{count} parts", CHATS, chat([{"type": "text", "text": ""}] * count)
        yield f"{count} ids", TEXTS, {"prompt": [7] * count}
        yield f"{count} biases", CHATS, chat("x", logit_bias=dict.fromkeys(map(str, range(count)), 1))
        yield f"{count} variables", CHATS, chat("x", chat_template_kwargs=dict.fromkeys(map(str, range(count)), 1))
        yield f"{count} documents", CHATS, chat("x", documents=[{}] * count)
        yield f"detokenize {count}", "/detokenize", {"tokens": [700] * count}
    for name, piece in {
        "objects": b"{},",
        "arrays": b"[],",
        "strings": b'"",',
        "keys": b'"a":1,',
        "nested": b"[",
    }.items():
        yield (
            f"JSON: {name}",
            CHATS,
            b'{"messages":[{"role":"user","content":"x"}],"x":[' + piece * (BYTES // len(piece)),
        )


def tool(text):
    return {"type": "function", "function": {"name": "f", "description": text, "parameters": {"type": "object"}}}


async def watch(stalls):
    while True:
        began = time.perf_counter()
        await asyncio.sleep(0.001)
        stalls.append(time.perf_counter() - began)


async def main():
    """Prints one line for each body. The client's own work is excluded from the time."""
    process = psutil.Process()
    async with rest_side(say("Hi")) as rest:
        for name, path, body in bodies():
            data = body if isinstance(body, bytes) else json.dumps(body, ensure_ascii=False).encode()
            del body
            gc.collect()
            before = process.memory_info().rss
            async with RawClient.connect(rest.port) as client:
                head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n".encode()
                await client.send(head + data[:-1])
                await asyncio.sleep(0.2)
                stalls = []
                watcher = asyncio.create_task(watch(stalls))
                await asyncio.sleep(0.005)
                began = time.process_time()
                await client.send(data[-1:])
                client.writer.transport.set_write_buffer_limits()
                async with asyncio.timeout(60):
                    status, _ = await client.head()
                cpu = time.process_time() - began
                await asyncio.sleep(0.005)
                watcher.cancel()
            del data
            kept = (process.memory_info().rss - before) / 1e6
            print(f"{cpu:7.3f} s  {max(stalls) * 1000:7.1f} ms  {kept:7.1f} MB  {status}  {name}", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
