"""Chats that run during a test, and prompts with shared prefixes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from support.processes.stack import Stack

_NAMES = ("Mia", "Tom", "Lily", "Ben", "Sam", "Anna", "Max", "Lucy")
_THINGS = ("red kite", "small boat", "big dog", "blue ball")


def story_prompts(count: int, first: int = 0) -> list[str]:
    """Returns different prompts in groups with a shared prefix, long enough for a remote prefill."""
    return [
        f"Here is what happened before. {_NAMES[index % 4]} went to the park with a friend. They saw a bird in a tall "
        "tree and a little fish in the pond. The sun was warm, and they ate apples on the green grass. Then it began "
        "to rain, so they ran home and had soup. Their mother smiled, and read them a book about the moon until they "
        f"fell asleep. Now tell me a story about {_NAMES[index // 4 % 8]} and a {_THINGS[index // 2 % 4]}, "
        f"number {index}."
        for index in range(first, first + count)
    ]


class Load:
    """Concurrent greedy chats. `close` waits for them."""

    def __init__(self, stack: Stack, prompts: list[str], **fields: Any) -> None:
        self._pool = ThreadPoolExecutor(len(prompts))
        fields = {"temperature": 0, "max_tokens": 48, **fields}
        self._answers = [self._pool.submit(stack.chat, prompt, **fields) for prompt in prompts]

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    @property
    def num_done(self) -> int:
        return sum(answer.done() for answer in self._answers)

    def texts(self) -> list[str]:
        """Returns the texts of all answers, in the order of the prompts. Raises the error of a failed chat."""
        return [answer.result()["choices"][0]["message"]["content"] for answer in self._answers]
