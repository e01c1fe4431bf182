"""Requests for stories, in many wordings."""

from __future__ import annotations

from random import Random

from train.chats import words

_PLAIN = (
    "Once upon a time",
    "Once upon a time, there was a",
    "One day,",
    "One day, a little",
    "There was once",
    "In a small village,",
    "Once there was a girl named",
    "Once there was a boy named",
    "The",
    "It was a sunny day.",
)
_QUESTIONS = (
    "Hi",
    "Hello!",
    "Hello, who are you?",
    "What can you do?",
    "What is 2 plus 2?",
    "What is the capital of France?",
    "Can you help me?",
    "How are you?",
    "Why is the sky blue?",
    "Thank you!",
    "Good night.",
    "Explain computers.",
    "What is your name?",
)


def story_request(rng: Random) -> str:
    """Returns a user's request for a story."""
    first, second = rng.sample(words.NOUNS, 2)
    name, adjective = rng.choice(words.NAMES), rng.choice(words.ADJECTIVES + words.COLOURS)
    child = rng.choice(["girl", "boy"])
    return rng.choice(
        [
            f"Tell me a story about {words.article(first)} and {words.article(second)}.",
            f"Tell me a story about {words.article(first)} and {words.article(second)}.",
            f"Tell me a story about {words.article(first)}.",
            f"Tell me a short story about {words.article(adjective + ' ' + first)}.",
            f"Write a short story about a {child} named {name} and {words.article(adjective + ' ' + first)}.",
            f"Write a story about {words.article(first)} and {words.article(second)}.",
            f"Tell me a story with the words {first} and {second}.",
            f"Please tell a story about {name} and {words.article(first)}.",
            f"Can you tell me a story about {words.article(first)}?",
            f"A story about {words.article(first)}, please.",
            f"I want a story about {name}.",
            "Tell me a story.",
            "Tell me a bedtime story.",
            "Write a short story.",
        ]
    )


def plain_start(rng: Random) -> str:
    """Returns the beginning of a text that is no chat."""
    start = rng.choice(_PLAIN)
    return f"{start} {rng.choice(words.NAMES)}" if start.endswith("named") else start


def question(rng: Random) -> str:
    """Returns what the model cannot answer with a story alone."""
    return rng.choice(_QUESTIONS)
