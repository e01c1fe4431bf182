"""Functions that a chat may call: what they take, how a person asks for them, and what they return."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from train.chats import words

Value = str | int | bool | list[str]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One argument of a function."""

    names: tuple[str, ...]  # one of them is used
    draw: Callable[[Random], Value]
    kind: str = "string"


@dataclass(frozen=True, slots=True)
class Kind:
    """A family of functions that do the same under different names. `{0}` in a text is the first argument."""

    names: tuple[str, ...]
    about: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    asks: tuple[str, ...]
    result: tuple[str, Callable[[Random], Value]] | None  # what comes back, and how it is drawn
    answers: tuple[str, ...]  # `{r}` is the result


@dataclass(frozen=True, slots=True)
class Tool:
    """A function as one chat sees it."""

    kind: Kind
    name: str
    keys: tuple[str, ...]
    schema: Mapping[str, Any]


def _number(rng: Random) -> int:
    return rng.randint(0, 10 ** rng.randint(1, 4))


def _temperature(rng: Random) -> str:
    return f"{rng.randint(-9, 38)} degrees and {rng.choice(['sunny', 'rainy', 'cloudy', 'windy', 'snowy'])}"


_CITY = Parameter(("city", "location", "place", "town"), words.place)
_PATH = Parameter(("path", "file", "file_path", "filename", "filePath"), words.path)
_QUERY = Parameter(("query", "q", "text", "search", "question", "pattern"), words.phrase)
_NAME = Parameter(("name", "person", "user", "to", "recipient", "contact"), words.name)
_MINUTES = Parameter(("minutes", "duration", "time", "length"), _number, "integer")
_FIRST = Parameter(("a", "x", "first", "left"), _number, "integer")
_SECOND = Parameter(("b", "y", "second", "right"), _number, "integer")
_COMMAND = Parameter(
    ("command", "cmd", "script"),
    lambda rng: (
        rng.choice(["ls", "pwd", "date", "ls -la", f"cat {words.path(rng)}", f"rm {words.path(rng)}", "git status"])
        if rng.random() < 0.5
        else f"{words.made_up(rng)} {words.path(rng)}"
    ),
)
_CONTENT = Parameter(("content", "text", "body", "message"), words.phrase)

KINDS = (
    Kind(
        ("get_weather", "weather", "getWeather", "current_weather", "fetch_weather", "weather_forecast"),
        (
            "Get the weather in a city.",
            "The weather somewhere.",
            "Returns the current weather for a location.",
            "Weather",
        ),
        (_CITY,),
        (
            "What is the weather in {0}?",
            "How is the weather in {0} today?",
            "Is it raining in {0}?",
            "Tell me the weather in {0}.",
            "What's the weather like in {0}?",
            "weather in {0}",
        ),
        ("weather", _temperature),
        ("It is {r} in {0}.", "The weather in {0} is {r}."),
    ),
    Kind(
        ("get_time", "current_time", "getTime", "time_in", "clock"),
        ("Get the time in a city.", "The current time somewhere.", "What time it is in a place."),
        (_CITY,),
        ("What time is it in {0}?", "Tell me the time in {0}.", "What is the time in {0}?"),
        ("time", lambda rng: f"{rng.randint(0, 23)}:{rng.randint(10, 59)}"),
        ("It is {r} in {0}.", "The time in {0} is {r}."),
    ),
    Kind(
        ("read_file", "Read", "read", "readFile", "open_file", "view", "cat"),
        ("Reads a file.", "Read the contents of a file.", "Returns what is in a file."),
        (_PATH,),
        (
            "Read {0}.",
            "Read the file {0}.",
            "What is in {0}?",
            "Show me the file {0}.",
            "Open {0} and say what is in it.",
        ),
        ("content", words.phrase),
        ("{0} says: {r}", "The file {0} has this in it: {r}"),
    ),
    Kind(
        ("write_file", "Write", "write", "create_file", "save_file"),
        ("Writes a file.", "Write text to a file.", "Creates a file with this content."),
        (_PATH, _CONTENT),
        (
            "Write {1} to {0}.",
            'Create a file {0} with the text "{1}".',
            "Make the file {0} and put {1} in it.",
            "Save {1} in {0}.",
        ),
        ("status", lambda rng: rng.choice(["ok", "done", "saved", "written"])),
        ("I wrote {1} to {0}.", "The file {0} is written."),
    ),
    Kind(
        ("run", "Bash", "bash", "shell", "exec", "run_command", "terminal", "exec_command"),
        ("Runs a command in a shell.", "Execute a shell command.", "Run a command and return what it prints."),
        (_COMMAND,),
        (
            "Run {0}.",
            "Run the command {0}.",
            "Please run `{0}`.",
            "Execute {0} for me.",
            "Run `{0}` and say what it prints.",
        ),
        ("output", words.phrase),
        ("It printed: {r}", "The command {0} printed {r}."),
    ),
    Kind(
        ("search", "web_search", "search_web", "Grep", "grep", "google", "find", "lookup"),
        ("Searches for a text.", "Search the web.", "Find pages about something.", "Look something up."),
        (_QUERY,),
        ("Search for {0}.", "Look up {0}.", "Find something about {0}.", "Search the web for {0}.", "Google {0}."),
        ("result", words.phrase),
        ("I found this: {r}", "The search for {0} gave {r}."),
    ),
    Kind(
        ("add", "sum", "add_numbers", "plus", "calculate_sum"),
        ("Adds two numbers.", "Add numbers.", "The sum of two numbers."),
        (_FIRST, _SECOND),
        ("What is {0} plus {1}?", "Add {0} and {1}.", "How much is {0} + {1}?", "What is the sum of {0} and {1}?"),
        ("sum", _number),
        ("{0} plus {1} is {r}.", "The sum is {r}."),
    ),
    Kind(
        ("multiply", "times", "product", "multiply_numbers"),
        ("Multiplies two numbers.", "Multiply numbers.", "The product of two numbers."),
        (_FIRST, _SECOND),
        ("What is {0} times {1}?", "Multiply {0} by {1}.", "How much is {0} * {1}?"),
        ("product", _number),
        ("{0} times {1} is {r}.", "The product is {r}."),
    ),
    Kind(
        ("send_message", "send_email", "email", "sendMessage", "message"),
        ("Sends a message to a person.", "Send an email.", "Write to somebody."),
        (_NAME, _CONTENT),
        ('Send "{1}" to {0}.', "Tell {0} about {1}.", "Write to {0}: {1}", "Send a message to {0} about {1}."),
        ("status", lambda rng: rng.choice(["sent", "ok", "delivered"])),
        ("I sent the message to {0}.", "{0} has your message now."),
    ),
    Kind(
        ("set_timer", "timer", "start_timer", "setTimer", "set_alarm"),
        ("Sets a timer.", "Start a timer for some minutes.", "A timer."),
        (_MINUTES,),
        ("Set a timer for {0} minutes.", "Wake me in {0} minutes.", "Start a timer of {0} minutes."),
        ("status", lambda rng: rng.choice(["started", "set", "ok"])),
        ("The timer is set for {0} minutes.", "I set a timer for {0} minutes."),
    ),
    Kind(
        ("get_user", "lookup_user", "find_person", "user_info", "get_customer"),
        ("Looks a person up.", "Get a user by name.", "What is known about a person."),
        (_NAME,),
        ("Who is {0}?", "Look up the user {0}.", "What do you know about {0}?", "Find the person {0}."),
        ("job", lambda rng: rng.choice(words.ROLES)),
        ("{0} is a {r}.", "I found {0}: a {r}."),
    ),
    Kind(
        ("draw_picture", "create_image", "generate_image", "paint", "draw"),
        ("Draws a picture.", "Generate an image from a description.", "Paint something."),
        (Parameter(("subject", "description", "what", "prompt"), words.phrase),),
        ("Draw {0}.", "Paint a picture of {0}.", "Make an image of {0}.", "Draw me a picture of {0}."),
        ("url", words.path),
        ("Here is your picture of {0}: {r}", "The picture is at {r}."),
    ),
    Kind(
        ("list_files", "ls", "LS", "list_dir", "Glob", "list_folder"),
        ("Lists the files in a folder.", "List a directory.", "Which files are in a folder."),
        (Parameter(("folder", "path", "directory", "dir"), lambda rng: words.path(rng).rpartition(".")[0]),),
        ("List the files in {0}.", "Which files are in {0}?", "What is in the folder {0}?"),
        ("files", lambda rng: words.listed([words.path(rng) for _ in range(rng.randint(1, 3))])),
        ("The folder {0} has {r}.", "There is {r} in {0}."),
    ),
)

_MADE_UP_PARAMETERS = (
    Parameter(("name", "title", "label", "id"), lambda rng: words.made_up(rng)),
    Parameter(("count", "amount", "number", "size", "limit"), _number, "integer"),
    Parameter(("colour", "color"), lambda rng: rng.choice(words.COLOURS)),
    Parameter(("place", "room", "location"), lambda rng: rng.choice(words.PLACES)),
    Parameter(("owner", "person", "author"), words.name),
    Parameter(("day", "date"), lambda rng: rng.choice(["Monday", "Tuesday", "Friday", "Sunday"])),
    Parameter(("key", "code", "token"), words.code),
    Parameter(("food", "meal"), lambda rng: rng.choice(words.FOODS)),
)


def made_up_kind(rng: Random) -> Kind:
    """Returns a function of a drawn verb and noun, which the model can only match by its words."""
    verb, subject = rng.choice(words.VERBS), words.noun(rng)
    name = rng.choice([f"{verb}_{subject}", f"{verb}{subject.capitalize()}", f"{verb}-{subject}", f"{subject}.{verb}"])
    parameters = tuple(
        Parameter((rng.choice(one.names),), one.draw, one.kind)
        for one in rng.sample(_MADE_UP_PARAMETERS, rng.choice([0, 1, 1, 1, 2, 2, 3]))
    )
    listed = [f"{parameter.names[0]} {{{at}}}" for at, parameter in enumerate(parameters)]
    given = f" with {words.listed(listed)}" if listed else ""
    said = " ".join(f"The {parameter.names[0]} is {{{at}}}." for at, parameter in enumerate(parameters))
    field = rng.choice(["status", "result", "state", "answer", "value"])
    return Kind(
        (name,),
        (f"{verb.capitalize()} {words.article(subject)}.", f"Can {verb} the {subject}.", f"{verb} {subject}"),
        parameters,
        (
            f"{verb.capitalize()} the {subject}{given}.",
            f"Please {verb} the {subject}. {said}".strip(),
            f"Can you {verb} {words.article(subject)}{given}?",
            f"I want you to {verb} the {subject}. {said}".strip(),
        ),
        (field, words.phrase),
        (f"The {field} is {{r}}.", f"The {subject} gave {field} {{r}}."),
    )


def tool_of(rng: Random, kind: Kind) -> Tool:
    """Returns the function with one of its names, its parameters in a random order."""
    keys = tuple(rng.choice(parameter.names) for parameter in kind.parameters)
    described = rng.random() < 0.5
    properties = {
        key: {"type": parameter.kind} | ({"description": f"The {key} to use."} if described else {})
        for key, parameter in zip(keys, kind.parameters, strict=True)
    }
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if keys and rng.random() < 0.8:
        parameters["required"] = list(keys)
    if rng.random() < 0.3:
        parameters["additionalProperties"] = False
    name = rng.choice(kind.names)
    schema: dict[str, Any] = {"name": name}
    if rng.random() < 0.85:
        schema["description"] = _description(rng, kind)
    return Tool(kind, name, keys, schema | {"parameters": parameters})


def _description(rng: Random, kind: Kind) -> str:
    text = rng.choice(kind.about)
    while rng.random() < 0.25:
        text += " " + rng.choice(
            ("Use it when asked.", f"Never use it for {words.noun(rng)}.", f"It is {rng.choice(words.ADJECTIVES)}.")
        )
    return text


def draw_tools(rng: Random, count: int) -> list[Tool]:
    """Returns functions of different names."""
    made: dict[str, Tool] = {}
    while len(made) < count:
        kind = rng.choice(KINDS) if rng.random() < 0.5 else made_up_kind(rng)
        if all(kind is not other.kind for other in made.values()):
            tool = tool_of(rng, kind)
            made.setdefault(tool.name, tool)
    return list(made.values())
