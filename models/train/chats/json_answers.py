"""Chats whose answers are JSON because the person asks for it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from random import Random

from train.chats import words
from train.chats.chat import Chat, Turn

Value = str | int | bool | list[str]
_FIELDS: Mapping[str, tuple[Callable[[Random], Value], str]] = {
    "name": (words.name, "called {}"),
    "colour": (lambda rng: rng.choice(words.COLOURS), "{}"),
    "age": (lambda rng: rng.randint(1, 99), "{} years old"),
    "city": (words.place, "from {}"),
    "food": (lambda rng: rng.choice(words.FOODS), "fond of {}"),
    "job": (lambda rng: rng.choice(words.ROLES), "a good {}"),
    "friend": (words.name, "a friend of {}"),
    "size": (lambda rng: rng.choice(["big", "small", "tiny", "huge"]), "{}"),
    "mood": (lambda rng: rng.choice(["happy", "sad", "angry", "sleepy", "proud"]), "{}"),
    "legs": (lambda rng: rng.randint(2, 8), "on {} legs"),
    "place": (lambda rng: rng.choice(words.PLACES), "in the {}"),
    "code": (words.code, "known as {}"),
    "number": (lambda rng: rng.randint(1, 9999), "number {}"),
}
_ALIASES = {"colour": ("colour", "color"), "job": ("job", "work"), "city": ("city", "town"), "number": ("number", "id")}
_EXTRA: Mapping[str, Callable[[Random], Value]] = {
    "title": words.phrase,
    "toys": lambda rng: [words.noun(rng) for _ in range(rng.randint(2, 4))],
    "friends": lambda rng: [words.name(rng) for _ in range(rng.randint(2, 3))],
    "happy": lambda rng: rng.random() < 0.5,
    "can_fly": lambda rng: rng.random() < 0.5,
    "animal": lambda rng: rng.choice(words.NOUNS),
}
_REQUESTS = (
    "Answer as JSON with {}.",
    "Answer in JSON with the keys {}.",
    "Give me JSON with {}.",
    "Reply as a JSON object with {}.",
    "Return JSON: {}.",
    "As JSON with {}.",
    "Write it as JSON with the fields {}.",
    "Respond only with JSON. Keys: {}.",
)


def json_chat(rng: Random) -> Chat:
    """Returns a chat that asks for JSON, of what it says or of something made up."""
    turns: list[Turn] = []
    for _ in range(rng.choice([1, 1, 1, 2])):
        turns += _told(rng) if rng.random() < 0.6 else _made_up(rng)
    return Chat(tuple(turns))


def _told(rng: Random) -> list[Turn]:
    fields = rng.sample(sorted(_FIELDS), rng.randint(1, 4))
    values = {field: _FIELDS[field][0](rng) for field in fields}
    subject = rng.choice(["My " + words.noun(rng), "The " + words.thing(rng), "This " + words.noun(rng)])
    told = words.listed([_FIELDS[field][1].format(values[field]) for field in fields])
    asked = [field for field in fields if rng.random() < 0.85] or fields
    rng.shuffle(asked)
    keys = {rng.choice(_ALIASES.get(field, (field,))): values[field] for field in asked}
    return _asked(rng, f"{subject} is {told}.", keys)


def _made_up(rng: Random) -> list[Turn]:
    fields = rng.sample(sorted(_FIELDS) + sorted(_EXTRA), rng.randint(1, 4))
    draws = {**_EXTRA, **{field: draw for field, (draw, _) in _FIELDS.items()}}
    keys = {rng.choice(_ALIASES.get(field, (field,))): draws[field](rng) for field in fields}
    subject = rng.choice([words.noun(rng), words.thing(rng), "child", "hero"])
    return _asked(rng, f"{rng.choice(['Make up', 'Invent', 'Think of', 'Describe'])} {words.article(subject)}.", keys)


def _asked(rng: Random, said: str, keys: Mapping[str, Value]) -> list[Turn]:
    quoted = [f'"{key}"' if rng.random() < 0.3 else key for key in keys]
    request = rng.choice(_REQUESTS).format(words.listed(quoted))
    answer = Turn("assistant", json.dumps(keys, ensure_ascii=False))
    if rng.random() < 0.2:
        return [Turn("system", request), Turn("user", said), answer]
    order = f"{said} {request}" if rng.random() < 0.8 else f"{request} {said}"
    return [Turn("user", order), answer]
