"""The page of commands: what --help prints of each."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator

from markdown_text import GENERATED_NOTE

from baton.services import cli

# Their help is that of the command that they belong to.
_WITHOUT_OWN_HELP = frozenset({*cli.SERVICES, *cli.NESTED["completion"]})
_COLUMNS = "100"


def commands_page() -> str:
    """Returns the help of every command but the services'."""
    parts = [
        f"# Commands\n\n{GENERATED_NOTE}\n"
        "The services have pages of their own: [gateway](gateway.md), [router](router.md), [kvstore](kvstore.md) and "
        "[worker](worker.md). The variable of a flag is named behind its default; the flag overrides it.\n"
    ]
    parts += [f"## baton {' '.join(words)}\n\n```text\n{help_text(*words).rstrip()}\n```\n" for words in commands()]
    return "\n".join(parts)


def help_text(*words: str) -> str:
    """Returns what `baton WORDS --help` prints."""
    printed = io.StringIO()
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = _COLUMNS
    try:
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            cli.main([*words, "--help"], {})
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before
    return printed.getvalue()


def commands() -> Iterator[tuple[str, ...]]:
    """Yields the words of every command but the services'."""
    for name in cli.TOOLS:
        yield (name,)
        yield from ((name, nested) for nested in cli.NESTED.get(name, ()) if nested not in _WITHOUT_OWN_HELP)
