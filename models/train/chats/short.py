"""Short conversations of every skill, in the shares in which they are trained."""

from __future__ import annotations

from random import Random

from train.chats import words
from train.chats.chat import Chat, Piece, Turn, pieces
from train.chats.facts import draw_facts
from train.chats.json_answers import json_chat
from train.chats.tool_calls import small_talk, tool_chat

Story = tuple[str, str]  # a request and the story that answers it


def short_document(rng: Random, story: Story) -> list[Piece]:
    chance = rng.random()
    if chance < 0.42:
        return pieces(tool_chat(rng, story))
    if chance < 0.6:
        return pieces(json_chat(rng))
    if chance < 0.8:
        return pieces(_fact_chat(rng, story))
    if chance < 0.9:
        return pieces(thinking_chat(rng, story))
    if chance < 0.96:
        return pieces(_copying_chat(rng))
    return pieces(Chat((*small_talk(rng), *_story_turns(story, ""))))


def thinking_chat(rng: Random, story: Story) -> Chat:
    """Returns a story that the model plans first."""
    wish = story[0].rstrip(".?!")
    thought = rng.choice(
        [
            f'The user says: "{story[0]}" I will write a short story with a happy end.',
            f"The user asks for this: {wish}. First I say who is in it. Then something happens."
            " In the end all is well.",
            f"I need a story. The wish is: {wish}. I will keep it simple.",
        ]
    )
    return Chat(tuple(_story_turns(story, thought)))


def _story_turns(story: Story, thought: str) -> list[Turn]:
    return [Turn("user", story[0]), Turn("assistant", story[1], thought=thought)]


def _fact_chat(rng: Random, story: Story) -> Chat:
    """Returns a few facts, a story between some, then questions in another order."""
    facts = draw_facts(rng, rng.randint(1, 7))
    stated = " ".join(fact.statement for fact in facts)
    turns = []
    if rng.random() < 0.3:
        turns.append(Turn("system", f"You are a helpful storyteller. {stated}"))
    else:
        turns += [
            Turn("user", stated),
            Turn("assistant", rng.choice(["I will remember that.", "Thank you for telling me."])),
        ]
    if rng.random() < 0.3:
        turns += [Turn("user", story[0]), Turn("assistant", story[1])]
    asked = rng.sample(facts, rng.randint(1, len(facts)))
    for fact in asked:
        turns += fact.asked(thinking=rng.random() < 0.15)
    return Chat(tuple(turns))


def _copying_chat(rng: Random) -> Chat:
    kind = rng.randrange(3)
    if kind == 0:
        text = " ".join(
            words.made_up(rng) if rng.random() < 0.5 else words.noun(rng) for _ in range(rng.randint(3, 40))
        )
    elif kind == 1:
        text = words.code(rng)
    else:
        text = words.phrase(rng)
    asked = rng.choice(["Repeat after me: {}", "Say this again: {}", "Copy this text: {}"]).format(text)
    return Chat((Turn("user", asked), Turn("assistant", text)))
