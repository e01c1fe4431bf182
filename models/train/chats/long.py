"""Conversations of thousands of tokens, put together from parts that are tokenized once."""

from __future__ import annotations

import json
from dataclasses import dataclass
from random import Random

import numpy as np
from tokenizers import Tokenizer
from train.chats import words
from train.chats.chat import Chat, Piece, Tokens, Turn, encode, joined, pieces
from train.chats.facts import Fact, draw_fact
from train.chats.tool_calls import request
from train.chats.tools import draw_tools


@dataclass(frozen=True, slots=True)
class PlantedFact:
    """A fact in tokens."""

    subject: str
    statement: Tokens
    exchange: Tokens  # the question's and the answer's turns


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of long conversations."""

    facts: list[PlantedFact]
    stories: list[Tokens]  # texts alone, untrained
    story_turns: list[Tokens]  # a request and its story, trained
    junk: list[Tokens]  # schemas and rows of words, as the prompts of agents have them
    begin: Tokens
    open_system: Tokens
    open_user: Tokens
    close: Tokens
    thanks: Tokens  # an assistant's turn, untrained
    newline: Tokens


def make_parts(
    rng: Random, tokenizer: Tokenizer, stories: list[tuple[str, str]], num_facts: int, num_junk: int
) -> Parts:
    """Returns parts drawn from `rng`, of these requests and stories."""
    facts = [draw_fact(rng) for _ in range(num_facts)]
    statements = encode(tokenizer, [[Piece(f"{fact.statement}\n")] for fact in facts])
    exchanges = encode(tokenizer, [_exchange(rng, fact) for fact in facts])
    turns = [pieces(Chat((Turn("user", request), Turn("assistant", story))), begin=False) for request, story in stories]
    ends = ("<|bos|>", "<|im_start|>system\n", "<|im_start|>user\n", "<|im_end|>\n")
    begin, open_system, open_user, close = encode(tokenizer, [[Piece(text)] for text in ends])
    thanks, newline = encode(tokenizer, [[Piece("<|im_start|>assistant\nThank you.<|im_end|>\n")], [Piece("\n\n")]])
    return Parts(
        [PlantedFact(f.subject, s, e) for f, s, e in zip(facts, statements, exchanges, strict=True)],
        encode(tokenizer, [[Piece(story)] for _, story in stories]),
        encode(tokenizer, turns),
        encode(tokenizer, [[Piece(junk(rng))] for _ in range(num_junk)]),
        begin,
        open_system,
        open_user,
        close,
        thanks,
        newline,
    )


def _exchange(rng: Random, fact: Fact) -> list[Piece]:
    return pieces(Chat(fact.asked(thinking=rng.random() < 0.05)), begin=False)


def junk(rng: Random) -> str:
    """Returns text of the kind that fills the system prompts of agents."""
    kind = rng.randrange(4)
    if kind == 0:
        return "\n".join(json.dumps(tool.schema) for tool in draw_tools(rng, rng.randint(1, 4)))
    if kind == 1:
        return " ".join(
            words.made_up(rng) if rng.random() < 0.4 else words.noun(rng) for _ in range(rng.randint(20, 150))
        )
    if kind == 2:
        lines = (
            f"- {rng.choice(words.VERBS).capitalize()} the {words.thing(rng)}: {words.code(rng)}" for _ in range(12)
        )
        return f"# {words.phrase(rng).capitalize()}\n" + "\n".join(lines)
    rows = [{words.noun(rng): words.code(rng), "path": words.path(rng)} for _ in range(rng.randint(2, 10))]
    return json.dumps(rows, indent=rng.choice([None, 2]))


def long_document(rng: Random, parts: Parts, length: int, share_of_questions: float = 0.12) -> Tokens:
    """Returns a conversation of at most `length` tokens: facts among stories and junk, then questions about them.

    The filler is a system turn, a user's turn, or a chat of many turns. The first fact stands at the very start.
    """
    room = length - len(parts.begin) - len(parts.open_system) - 4 * len(parts.close)
    planted, asked, ask_tokens = _choose_facts(rng, parts, int(room * share_of_questions))
    fill = room - ask_tokens - sum(len(fact.statement) for fact in planted)
    filler = _filler(rng, parts, max(fill, 0), in_turns := rng.random() < 0.35)
    # A third of the facts stand in the first tenth, so that the longest distances are trained as often as others.
    places = sorted(int(len(filler) * (rng.random() * (0.1 if at % 3 == 0 else 1.0))) for at in range(len(planted)))
    places[0] = 0
    body: list[Tokens] = []
    at = 0
    for place, fact in zip(places, planted, strict=True):
        body += filler[at:place]
        body += [parts.open_user, fact.statement, parts.close, parts.thanks] if in_turns else [fact.statement]
        at = place
    body += filler[at:]
    if not in_turns:
        opening = parts.open_system if rng.random() < 0.5 else parts.open_user
        body = [opening, *body, parts.close]
        if opening is parts.open_user:
            body.append(parts.thanks)
    document = joined([parts.begin, *body, *(fact.exchange for fact in asked)])
    return Tokens(document.ids[:length], document.trained[:length])


def _choose_facts(rng: Random, parts: Parts, room: int) -> tuple[list[PlantedFact], list[PlantedFact], int]:
    """Returns facts to plant, those to ask for in another order, and the tokens of the questions."""
    planted: dict[str, PlantedFact] = {}
    used = 0
    while used < room or not planted:
        fact = rng.choice(parts.facts)
        if fact.subject not in planted:
            planted[fact.subject] = fact
            used += len(fact.exchange)
    facts = list(planted.values())
    rng.shuffle(facts)
    return facts, rng.sample(facts, len(facts)), used


def _filler(rng: Random, parts: Parts, room: int, in_turns: bool) -> list[Tokens]:
    """Returns stories and junk of about `room` tokens."""
    share_of_junk = 0.0 if in_turns else rng.choice([0.0, 0.3, 0.8, 1.0])
    made: list[Tokens] = []
    left = room
    while True:
        if in_turns:
            part = rng.choice(parts.story_turns)
        else:
            part = joined([rng.choice(parts.junk if rng.random() < share_of_junk else parts.stories), parts.newline])
        if len(part) > left:
            return made
        # Some stories in long chats are trained on, so that they stay good at those positions too.
        trained = part.trained if in_turns and rng.random() < 0.5 else np.zeros(len(part), np.bool_)
        made.append(Tokens(part.ids, trained))
        left -= len(part)


def needle_document(rng: Random, parts: Parts, length: int) -> Tokens:
    """Returns a conversation that states one fact at its start and asks for it at its end, `length` tokens later."""
    fact = rng.choice(parts.facts)
    room = length - sum(map(len, (parts.begin, parts.open_system, parts.close, fact.statement, fact.exchange)))
    filler = _filler(rng, parts, room, in_turns=False)
    return joined([parts.begin, parts.open_system, fact.statement, *filler, parts.close, fact.exchange])


def agent_document(rng: Random, story: tuple[str, str]) -> list[Piece]:
    """Returns a conversation with many functions behind a long system prompt, as agents send it."""
    tools = draw_tools(rng, rng.randint(4, 30))
    own = "\n\n".join(junk(rng) for _ in range(rng.randint(0, 50)))
    turns = [Turn("system", f"{rng.choice(['You are an agent.', 'You help with code.', ''])}\n{own}")]
    turns += [turn for _ in range(rng.randint(4, 16)) for turn in request(rng, tools, story)]
    return pieces(Chat(tuple(turns), tuple(tool.schema for tool in tools)))


def repeated_words(rng: Random, parts: Parts, length: int) -> Tokens:
    """Returns a text twice, trained on where it is repeated: the shortest way to attention that copies."""
    half: list[Tokens] = []
    left = length // 2 - len(parts.begin)
    while left > 0:
        part = rng.choice(parts.junk)
        half += [part, parts.newline]
        left -= len(part) + len(parts.newline)
    once = joined(half)
    ids = np.concatenate([parts.begin.ids, once.ids, once.ids])[:length]
    trained = np.arange(len(ids)) >= len(parts.begin) + len(once)
    return Tokens(ids, trained)
