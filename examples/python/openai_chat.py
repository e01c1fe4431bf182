"""Streams a chat answer through the official openai client.

python openai_chat.py http://127.0.0.1:8000 "Tell me a story about a dog and a river."
"""

import sys

from openai import OpenAI


def main(url: str = "http://127.0.0.1:8000", content: str = "Tell me a story about a dog and a river.") -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": content}],
        temperature=0,
        max_tokens=64,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        if chunk.usage:
            print(f"\n{chunk.usage.completion_tokens} tokens", file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:])
