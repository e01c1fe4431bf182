"""Facts that a conversation states once and asks for later: what teaches the model to attend far back."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from train.chats import words
from train.chats.chat import Turn


@dataclass(frozen=True, slots=True)
class Fact:
    """One statement, the question about it, and the answer."""

    subject: str  # a document holds one fact of each subject
    statement: str
    question: str
    answer: str
    thought: str

    def asked(self, thinking: bool) -> tuple[Turn, Turn]:
        """Returns the question's two turns."""
        return Turn("user", self.question), Turn("assistant", self.answer, thought=self.thought if thinking else "")


def draw_fact(rng: Random) -> Fact:
    """Returns a fact of any kind."""
    return rng.choice((_own, _own, _called, _called, _belonging, _belonging, _located, _secret, _listed))(rng)


def draw_facts(rng: Random, count: int) -> list[Fact]:
    """Returns at most this many facts, each of another subject."""
    made: dict[str, Fact] = {}
    for _ in range(count):
        fact = draw_fact(rng)
        made.setdefault(fact.subject, fact)
    return list(made.values())


def _fact(rng: Random, subject: str, statement: str, question: str, answer: str) -> Fact:
    thought = rng.choice([f"The user asks about {subject}. I remember: {answer}", f"I read this before. {answer}"])
    return Fact(subject, statement, question, answer, thought)


def _own(rng: Random) -> Fact:
    """Returns a statement of the user about himself."""
    what, draw = rng.choice(
        [
            ("name", words.name),
            ("name", words.name),
            ("name", words.name),
            ("favourite colour", lambda r: r.choice(words.COLOURS)),
            ("city", words.place),
            ("best friend", words.name),
            ("secret word", words.made_up),
            ("dog", words.name),
            ("cat", words.name),
            ("lucky number", words.digits),
            ("favourite food", lambda r: r.choice(words.FOODS)),
        ]
    )
    value = draw(rng)
    statement = rng.choice(
        [f"My {what} is {value}.", f"My {what} is {value}. Remember it.", f"Please remember: my {what} is {value}."]
    )
    if what == "name":
        statement = rng.choice([statement, f"I am {value}. My name is {value}.", f"Hello, my name is {value}."])
    question = rng.choice([f"What is my {what}?", f"Do you remember my {what}?", f"What did I say my {what} is?"])
    return _fact(rng, f"my {what}", statement, question, f"Your {what} is {value}.")


def _called(rng: Random) -> Fact:
    role = rng.choice(words.ROLES)
    of = f" of {words.place(rng)}" if rng.random() < 0.4 else ""
    subject, value = f"the {role}{of}", words.name(rng)
    upper = f"T{subject[1:]}"
    statement = rng.choice(
        [f"{upper} is called {value}.", f"{upper} is called {value}.", f"The name of {subject} is {value}."]
    )
    question = rng.choice(
        [
            f"What is {subject} called?",
            f"What is the name of {subject}?",
            f"How is {subject} called?",
            f"Who is {subject}?",
        ]
    )
    return _fact(rng, subject, statement, question, f"{upper} is called {value}.")


def _belonging(rng: Random) -> Fact:
    owner = words.name(rng)
    what, draw = rng.choice(
        [
            ("secret word", words.made_up),
            ("password", words.code),
            ("favourite colour", lambda r: r.choice(words.COLOURS)),
            ("dog", words.name),
            ("code", words.code),
            ("number", words.digits),
            ("home", words.place),
            ("favourite toy", words.thing),
        ]
    )
    value = draw(rng)
    subject = f"{owner}'s {what}"
    answer = f"{subject} is {value}."
    question = rng.choice([f"What is {subject}?", f"Do you remember {subject}?", f"Tell me {subject}."])
    return _fact(rng, subject, answer, question, answer)


def _located(rng: Random) -> Fact:
    subject = f"the {words.thing(rng)}"
    answer = f"T{subject[1:]} is in the {rng.choice(words.PLACES)} of {words.place(rng)}."
    return _fact(rng, subject, answer, rng.choice([f"Where is {subject}?", f"Where did you see {subject}?"]), answer)


def _secret(rng: Random) -> Fact:
    what = rng.choice(["magic number", "secret word", "pass key", "special code", "magic word"])
    value = words.code(rng) if rng.random() < 0.5 else words.digits(rng)
    of = f" of the {words.noun(rng)}" if rng.random() < 0.7 else ""
    subject = f"the {what}{of}"
    answer = f"T{subject[1:]} is {value}."
    return _fact(rng, subject, rng.choice([answer, f"{answer} Remember it."]), f"What is {subject}?", answer)


def _listed(rng: Random) -> Fact:
    owner = words.name(rng)
    things = words.listed([words.noun(rng) for _ in range(rng.randint(2, 4))])
    answer = f"{owner} has {things}."
    return _fact(rng, f"what {owner} has", answer, f"What does {owner} have?", answer)
